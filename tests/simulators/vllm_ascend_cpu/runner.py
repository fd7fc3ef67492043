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
        tensors = IntermediateTensors(self._outputs(step, received))
        tensors.kv_connector_output = None
        return tensors

    def _received(self, step: Step, arrived: Any) -> dict[str, Tensor]:
        expected_tensors = expected(step, self._stage - 1)
        if self._stage == 0:
            return expected_tensors
        self.early += int(arrived._comm_waited)
        received: dict[str, Tensor] = {}
        try:
            received = {name: arrived.tensors[name].clone() for name in expected_tensors}
        except (KeyError, RuntimeError, EquipoiseError) as error:
            self.absent.append(f"{type(error).__name__}: {error}")
        equal = bool(received) and all(
            _equal(received[name], expected_tensors[name]) for name in expected_tensors
        )
        self.right.append(equal)
        return received if equal else expected_tensors

    def _outputs(self, step: Step, received: dict[str, Tensor]) -> dict[str, Tensor]:
        change = {"hidden_states": 1, "residual": -1}
        outputs = {}
        for name, value in received.items():
            memory = self._memory[name, value.dtype][: value.numel()].view(value.shape)
            memory.copy_(value + change[name])
            outputs[name] = memory
        return outputs


def _equal(actual: Tensor, reference: Tensor) -> bool:
    return actual.dtype == reference.dtype and torch.equal(actual, reference)
