"""What a dispatch brought."""

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.pipeline.expert_exchange.format import BITS


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Rows that came, and the *entries*: what this rank's experts have to compute of them.

    An entry is one (token, choice) of some rank that fell on a slot of this rank. Results go back
    in the order of the entries. In the exchange of fixed capacity they stand by source rank, then
    by token, then by choice; those of source s begin at a fixed place, and where there are fewer
    than fit the rest are invalid.

    Attributes:
        payloads: tensors [blocks, rows, ...]; rows that nothing was sent for are undefined.
        rows: int64 [entries], block x rows a block + row of each entry; in range, also where the
            entry is invalid.
        slots: int32 [entries], local slot of each entry; slots_per_rank where it is invalid.
        counts: int32 [ranks], rows that came from each rank.
        loads: int32 [ranks, experts], every rank's histogram.
    """

    payloads: tuple[Tensor, ...]
    rows: Tensor
    slots: Tensor
    counts: Tensor
    loads: Tensor

    def gather(self, number: int) -> Tensor:
        """Payload `number` by entry, [entries, ...]; undefined where the entry is invalid."""
        payload = self.payloads[number]
        each = max(payload.shape[1], 1)
        block = torch.div(self.rows, each, rounding_mode="floor")
        bits = payload.view(BITS[payload.dtype.itemsize])
        return bits[block, self.rows % each].view(payload.dtype)
