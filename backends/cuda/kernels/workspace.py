"""The memory that kernels need beside their arguments: made once for each stream, and passed in.

What several programs add to is zero between two launches: every kernel leaves it as it found it.
Launches of one stream follow each other, so they may share a workspace. A captured graph may be
replayed beside other launches: it needs one of its own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256
"""Elements of a block within which occurrences are numbered."""
SMALL_BLOCKS = 4
"""Blocks of the largest batch that every program reads as a whole."""
LANES = 32
"""Of a warp: vectors of the solver are at least this long."""


@dataclass(frozen=True)
class Sizes:
    """What a workspace is made for.

    Attributes:
        experts: logical experts of a layer.
        slots: physical slots of a layer, over all ranks.
        ranks: that the slots are spread over.
        elements: of the largest batch that is apportioned or levelled.
        buffers: that `checksum_rows` may be given at once.
    """

    experts: int
    slots: int
    ranks: int
    elements: int
    buffers: int

    @property
    def blocks(self) -> int:
        """Blocks of the largest batch that is apportioned."""
        return max(1, -(-self.elements // BLOCK))

    @property
    def spare(self) -> int:
        """Slots that are not the first one of their expert; experts with several are no more."""
        return max(1, self.slots - self.experts)

    @property
    def entries(self) -> int:
        """Replicas of experts with several, as long as vectors are."""
        return max(LANES, power_of_two(min(2 * self.spare, self.slots)))

    @property
    def lanes(self) -> int:
        """Ranks, as long as vectors are."""
        return max(LANES, power_of_two(self.ranks))


@dataclass(frozen=True, eq=False)
class Workspace:
    """Memory on one device, for the launches of one stream.

    Attributes:
        sizes: what it was made for.
        totals: int32 [bins + 1], of experts and then a ticket; zero between launches.
        blocks: int32 [blocks, experts], of a batch that is apportioned.
        sums: int64 [buffers], of checksums; zero between launches.
        tickets: int32 [buffers], zero between launches.
        water: int64, of the solver; see `share_solver_fill`.
        places: int32, of the solver; see `share_solver_fill`.
        slot_loads: int64 [SMALL_BLOCKS, slots], of the programs that level; see `levelling`.
        slot_places: int32 [SMALL_BLOCKS, 2 * slots + 2 * entries], of the same.
    """

    sizes: Sizes
    totals: Tensor
    blocks: Tensor
    sums: Tensor
    tickets: Tensor
    water: Tensor
    places: Tensor
    slot_loads: Tensor
    slot_places: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of its memory."""
        shared = (self.totals, self.blocks, self.sums, self.tickets)
        return (*shared, self.water, self.places, self.slot_loads, self.slot_places)

    @staticmethod
    def make(sizes: Sizes, device: torch.device) -> "Workspace":
        """Zeroed on the host, so that no stream has to be waited for."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype).to(device)

        grid, entries = sizes.spare * sizes.lanes, 2 * sizes.spare
        return Workspace(
            sizes=sizes,
            totals=zeros(bins_of(sizes.experts) + 1),
            blocks=zeros(sizes.blocks, sizes.experts),
            sums=zeros(sizes.buffers, dtype=torch.int64),
            tickets=zeros(sizes.buffers),
            water=zeros(6 * grid + entries + 4 * sizes.lanes, dtype=torch.int64),
            places=zeros(4 * sizes.spare + 4 * entries),
            slot_loads=zeros(SMALL_BLOCKS, sizes.slots, dtype=torch.int64),
            slot_places=zeros(SMALL_BLOCKS, 2 * sizes.slots + 2 * sizes.entries),
        )


def bins_of(experts: int) -> int:
    """Bins of a histogram of experts."""
    return max(LANES, power_of_two(experts))


def power_of_two(number: int) -> int:
    """The least that is not below `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()
