"""Which slots a new placement fills, and where each copy comes from."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from equipoise.balancer.experts.placement import Placement, Shape


@dataclass(frozen=True)
class Move:
    """Fill `slot` of `layer` with `expert`, read from `source` (both are global slots)."""

    layer: int
    slot: int
    expert: int
    source: int


@dataclass(frozen=True)
class Itinerary:
    """All moves of an epoch, in an order that every rank derives alike.

    `travelling` are copies that the receiving rank did not hold; `local` ones only change place.
    """

    travelling: tuple[Move, ...]
    local: tuple[Move, ...]
    slots_per_rank: int

    def between(self, source: int, destination: int) -> tuple[Move, ...]:
        """Moves from one rank to another, or within one."""
        pool: Iterable[Move] = self.local if source == destination else self.travelling
        return tuple(move for move in pool if self.ends(move) == (source, destination))

    def ends(self, move: Move) -> tuple[int, int]:
        """(source rank, destination rank)."""
        return move.source // self.slots_per_rank, move.slot // self.slots_per_rank

    def arriving(self, rank: int) -> int:
        """How many staging buffers `rank` needs."""
        return sum(self.ends(move)[1] == rank for move in (*self.travelling, *self.local))


def itinerary(installed: Placement, proposed: Placement, shape: Shape) -> Itinerary:
    """Every slot whose expert changes, with sources spread over the expert's holders.

    A rank that holds the expert already is its own source; otherwise the holder that has sent
    least so far is, ties to the lower slot.
    """
    travelling: list[Move] = []
    local: list[Move] = []
    sent = np.zeros(shape.ranks, dtype=np.int64)
    for layer, slot in np.argwhere(installed != proposed).tolist():
        expert = int(proposed[layer, slot])
        holders = np.flatnonzero(installed[layer] == expert)
        here = holders[holders // shape.slots_per_rank == slot // shape.slots_per_rank]
        if here.size:
            local.append(Move(layer, slot, expert, int(here[0])))
            continue
        source = int(holders[np.argmin(sent[holders // shape.slots_per_rank])])
        sent[source // shape.slots_per_rank] += 1
        travelling.append(Move(layer, slot, expert, source))
    return Itinerary(tuple(travelling), tuple(local), shape.slots_per_rank)
