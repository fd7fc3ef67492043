"""A model runner in the place of vllm-ascend's: a stage of a pipeline that counts upwards.

It writes into the same tensors in every step, as a captured graph does: what has been handed over
is overwritten by the next step.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.hal.errors import EquipoiseError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LARGEST = 4096
"""Elements of a tensor."""


@dataclass(frozen=True)
class Step:
    """What is computed in one step.

    Attributes:
        number: of the step.
        rows: of both tensors; 0 for a step without tokens.
        width: of a row.
        dtype: name of a key of `DTYPES`.
    """

    number: int
    rows: int
    width: int
    dtype: str

    @property
    def total_num_scheduled_tokens(self) -> int:
        """As vLLM's `SchedulerOutput` has it."""
        return self.rows


def expected(step: Step, stage: int) -> dict[str, Tensor]:
    """What a stage hands over, or the last one has at its end; small whole numbers, so exact."""
    places = torch.arange(step.rows * step.width).view(step.rows, step.width)
    hidden = (places + 7 * step.number) % 64 + stage
    residual = (places + 3 * step.number) % 32 - stage
    kind = DTYPES[step.dtype]
    return {"hidden_states": hidden.to(kind), "residual": residual.to(kind)}


class Runner:
    """One stage.

    Attributes:
        right: by step with tokens, whether what came in was exactly what the stage before made.
        early: of those, how many had been waited for before anybody read them.
        absent: why what came in could not be read, each time that it could not.
    """

    def __init__(self, stage: int, stages: int) -> None:
        self._stage = stage
        self._last = stage == stages - 1
        self._memory = {
            (name, kind): torch.zeros(LARGEST, dtype=kind)
            for name in ("hidden_states", "residual")
            for kind in DTYPES.values()
        }
        self.right: list[bool] = []
        self.early = 0
        self.absent: list[str] = []

    def execute_model(self, step: Step, intermediate_tensors: Any) -> Any:
        """As vllm-ascend's runner is called."""
        from vllm.sequence import IntermediateTensors

        if step.rows == 0:
            return None
        received = self._received(step, intermediate_tensors)
        if self._last:
            return None
        made = IntermediateTensors(self._made(step, received))
        made.kv_connector_output = None
        return made

    def _received(self, step: Step, came: Any) -> dict[str, Tensor]:
        wanted = expected(step, self._stage - 1)
        if self._stage == 0:
            return wanted
        self.early += int(came._comm_waited)
        found: dict[str, Tensor] = {}
        try:
            found = {name: came.tensors[name].clone() for name in wanted}
        except (KeyError, RuntimeError, EquipoiseError) as error:
            self.absent.append(f"{type(error).__name__}: {error}")
        same = bool(found) and all(_equal(found[name], wanted[name]) for name in wanted)
        self.right.append(same)
        return found if same else wanted

    def _made(self, step: Step, received: dict[str, Tensor]) -> dict[str, Tensor]:
        change = {"hidden_states": 1, "residual": -1}
        made = {}
        for name, value in received.items():
            memory = self._memory[name, value.dtype][: value.numel()].view(value.shape)
            memory.copy_(value + change[name])
            made[name] = memory
        return made


def _equal(found: Tensor, wanted: Tensor) -> bool:
    return found.dtype == wanted.dtype and torch.equal(found, wanted)
