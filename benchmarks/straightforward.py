"""Maps of logical experts built one slot at a time, with a few tensor operations for each.

That is how a serving engine builds them when a layer's new placement is installed: for every
physical slot it looks its expert up, writes the slot into the next free column of the expert's row,
and counts. Then the map is widened to a fixed number of columns, so that captured graphs may keep
its address, and written over the one in use. Written again in our words, as the other side of a
comparison.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

WIDTH = 1024
"""Columns of the map in use."""


@dataclass(frozen=True)
class InUse:
    """The maps that routing reads: int64 [experts, WIDTH] and [experts]."""

    slots: Tensor
    counts: Tensor

    @staticmethod
    def empty(experts: int) -> "InUse":
        """Nothing mapped."""
        return InUse(
            torch.full((experts, WIDTH), -1, dtype=torch.int64),
            torch.zeros(experts, dtype=torch.int64),
        )


def install(placement: Tensor, in_use: InUse) -> None:
    """Build one layer's maps and write them.

    Args:
        placement: int64 [slots], the expert in each slot.
        in_use: overwritten.
    """
    experts = in_use.counts.numel()
    most = int(torch.bincount(placement, minlength=experts).max())
    found = torch.full((experts, most), -1, dtype=torch.int64)
    counts = torch.zeros(experts, dtype=torch.int64)
    for slot in range(placement.numel()):
        expert = placement[slot]
        if expert.item() < 0:
            continue
        column = counts[expert]
        found[expert, column] = slot
        counts[expert] = column + 1
    wide = torch.nn.functional.pad(found, (0, WIDTH - most), value=-1)
    in_use.slots.copy_(wide)
    in_use.counts.copy_(counts)
