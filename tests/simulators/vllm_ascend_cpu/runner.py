"""A model runner in the place of vllm-ascend's: a stage of a pipeline that counts upwards.

It writes into the same tensors in every step, as a captured graph does: what has been handed over
is overwritten by the next step.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.hal.errors import EquipoiseError

WIDTH = 16
"""Elements of a row."""
MAX_ROWS = 64
"""Rows of the largest step."""
MULTIPLE = 8
"""Steps are padded to a multiple of it, as to the sizes of captured graphs."""
NAMES = "hidden_states", "residual"


@dataclass(frozen=True)
class Step:
    """What is computed in one step.

    Attributes:
        number: of the step.
        rows: of both tensors; 0 for a step without tokens.
    """

    number: int
    rows: int

    @property
    def total_num_scheduled_tokens(self) -> int:
        """As vLLM's `SchedulerOutput` has it."""
        return self.rows

    @property
    def padded_rows(self) -> int:
        """With which the step is computed."""
        return -(-self.rows // MULTIPLE) * MULTIPLE


def expected(step: Step, stage: int) -> dict[str, Tensor]:
    """What a stage hands over, or the last one has at its end; small whole numbers, so exact."""
    places = torch.arange(step.rows * WIDTH).view(step.rows, WIDTH)
    hidden = (places + 7 * step.number) % 64 + stage
    residual = (places + 3 * step.number) % 32 - stage
    return {"hidden_states": hidden.bfloat16(), "residual": residual.bfloat16()}


class Model:
    """What the worker asks of a model."""

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """What a stage takes."""
        return {name: torch.zeros(batch_size, WIDTH, dtype=dtype, device=device) for name in NAMES}


class Runner:
    """One stage.

    Attributes:
        max_num_tokens: rows of the largest step.
        right: by step with tokens, whether what came in was exactly what the stage before made.
        finite: whether the padding behind it held numbers only, each time.
        early: of the steps, how many had been waited for before anybody read them.
        absent: why what came in could not be read, each time that it could not.
    """

    max_num_tokens = MAX_ROWS

    def __init__(self, stage: int, stages: int) -> None:
        self._stage = stage
        self._last = stage == stages - 1
        self._memory = {
            name: torch.full((MAX_ROWS, WIDTH), 99.0, dtype=torch.bfloat16) for name in NAMES
        }
        self.right: list[bool] = []
        self.finite = True
        self.early = 0
        self.absent: list[str] = []

    def get_model(self) -> Model:
        """As the worker asks for it."""
        return Model()

    def profile_run(self) -> None:
        """Nothing to measure."""

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
            padded = {name: arrived.tensors[name][: step.padded_rows].clone() for name in NAMES}
            assert all(len(tensor) == step.padded_rows for tensor in padded.values())
            self.finite &= all(bool(tensor.isfinite().all()) for tensor in padded.values())
            received = {name: tensor[: step.rows] for name, tensor in padded.items()}
        except (KeyError, RuntimeError, EquipoiseError) as error:
            self.absent.append(f"{type(error).__name__}: {error}")
        equal = bool(received) and all(
            torch.equal(received[name], expected_tensors[name]) for name in NAMES
        )
        self.right.append(equal)
        return received if equal else expected_tensors

    def _outputs(self, step: Step, received: dict[str, Tensor]) -> dict[str, Tensor]:
        change = {"hidden_states": 1, "residual": -1}
        for name, value in received.items():
            self._memory[name][: step.rows] = value + change[name]
        return {name: self._memory[name][: step.padded_rows] for name in NAMES}
