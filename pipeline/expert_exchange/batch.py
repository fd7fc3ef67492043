"""What a rank brings to one exchange."""

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.hal.errors import ExchangeError
from equipoise.pipeline.expert_exchange.format import ExchangeFormat, RowFormat, check_rows

GENERATION = RowFormat((), torch.int64)
LOAD = RowFormat((), torch.int32)


@dataclass(frozen=True, eq=False)
class Batch:
    """The tokens of one layer, on the device; read when the stream comes to it, not before.

    Attributes:
        slots: int32 [n, top_k], global slot ids; any id outside [0, ranks x slots_per_rank) is
            padding, of which nothing travels.
        payloads: tensors [n, ...], as the format says.
        generation: int64 [1], of the routing tables that made `slots`.
        loads: int32 [experts], this rank's histogram.
    """

    slots: Tensor
    payloads: tuple[Tensor, ...]
    generation: Tensor
    loads: Tensor

    @property
    def tokens(self) -> int:
        """How many, n."""
        return self.slots.shape[0]

    def check(self, form: ExchangeFormat) -> None:
        """Raise `ExchangeError` unless it fits."""
        if self.tokens > form.max_tokens:
            raise ExchangeError(f"tokens: expected {form.max_tokens} at most, got {self.tokens}")
        check_rows("slots", self.slots, self.tokens, RowFormat((form.top_k,), torch.int32))
        check_rows("generation", self.generation, 1, GENERATION)
        check_rows("loads", self.loads, form.experts, LOAD)
        if len(self.payloads) != len(form.payloads):
            raise ExchangeError(
                f"payloads: expected {len(form.payloads)}, got {len(self.payloads)}"
            )
        for number, (payload, row) in enumerate(zip(self.payloads, form.payloads, strict=True)):
            check_rows(f"payload {number}", payload, self.tokens, row)
