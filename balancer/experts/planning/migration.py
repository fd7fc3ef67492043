"""How the weights of a rebalance travel: chunks, sources, rounds, staging buffers.

The order of everything, and what is proven about it, stands on docs/design/shipment.md; the work is
done in csrc/migration/migration_plan.h, without the interpreter's lock. Words:

- *chunk*: layers that are staged, verified and committed together. At most two are in flight, one
travels while the other is voted on, and they are committed in order. - *round* of a chunk: in it a
rank sends at most one message and receives at most one. - *message*: slots that travel from one
rank to another in one round, by layer and slot at both ends. - *local slot*: layer * slots_per_rank
+ slot % slots_per_rank, as the slot store numbers them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index

import numpy as np
import numpy.typing as npt

from equipoise import _native
from equipoise.balancer.experts.placement import ExpertShape, Placement
from equipoise.hal.errors import PlacementError

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Send:
    """A blob to `peer`, packed from these local slots, in this order."""

    peer: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Recv:
    """A blob from `peer`, unpacked to these staging buffers, to be committed to these local slots.

    The buffers are consecutive.
    """

    peer: int
    staging: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class RoundTransfers:
    """What a rank does in one round: nothing, where both are None."""

    send: Send | None
    receive: Recv | None


@dataclass(frozen=True)
class LocalCopies:
    """Copies within a rank, one a position: local slot that is read, buffer, local slot to fill."""

    sources: tuple[int, ...]
    staging: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class RankTransfers:
    """What one rank does for one lot.

    Attributes:
        rounds: as many on every rank.
        local: what only changes place. It goes through staging too: a swap would overwrite its
            own source.
        copies: (staging buffer, local slot), all that the commit of the lot does on this rank.
    """

    rounds: tuple[RoundTransfers, ...]
    local: LocalCopies
    copies: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SlotMoves:
    """Every slot that gets another expert, int32 [moves] each; sorted by lot and rank.

    Attributes:
        layer: where it is.
        slot: which is filled.
        expert: with what.
        source: slot of the same layer that is read.
        staging: buffer, of the slot's rank, that the copy waits in for its commit.
        round: of its lot; -1 where the copy stays on its rank.
    """

    layer: Ids
    slot: Ids
    expert: Ids
    source: Ids
    staging: Ids
    round: Ids


@dataclass(frozen=True, eq=False)
class MigrationPlan:
    """All of an epoch, the same on every rank; `ship` makes it.

    Methods raise ValueError on a rank or a lot that there is not.

    Attributes:
        shape: how many of everything.
        staging: buffers of a rank.
        moves: all copies.
        layer_order: int32 [layers that may change], by lot.
        staging_needed: int32 [lots, ranks], buffers that a lot fills.
    """

    shape: ExpertShape
    staging: int
    moves: SlotMoves
    layer_order: Ids
    staging_needed: Ids
    _arrivals: Ids
    _departures: Ids
    _leaving: Ids
    _chunk_starts: Ids
    _rounds: Ids

    @property
    def chunks(self) -> int:
        """How many there are."""
        return len(self._rounds)

    @property
    def total_copies(self) -> int:
        """Copies, those within a rank included."""
        return len(self.moves.slot)

    @property
    def remote_copies(self) -> int:
        """Copies between ranks."""
        return len(self._departures)

    def remote_copies_in(self, lots: int) -> int:
        """Copies between ranks in the first `lots` lots."""
        last = int(self._arrivals[lots * self.shape.ranks])
        return int((self.moves.round[:last] >= 0).sum())

    def layers(self, lot: int) -> tuple[int, ...]:
        """The layers of a lot, in the order that was given."""
        lot = self._check_chunk(lot)
        first, last = self._chunk_starts[lot : lot + 2].tolist()
        return tuple(self.layer_order[first:last].tolist())

    def rounds(self, lot: int) -> int:
        """Rounds of a lot: the most blobs that one rank sends or receives in it."""
        return int(self._rounds[self._check_chunk(lot)])

    def fits_with(self, lot: int, other: int) -> bool:
        """Whether two lots may be in flight together.

        Only neighbours ever can be, as lots are launched and committed in order; they may exactly
        if no rank needs more buffers for both than it has.
        """
        both = (
            self.staging_needed[self._check_chunk(lot)]
            + self.staging_needed[self._check_chunk(other)]
        )
        return abs(lot - other) == 1 and bool((both <= self.staging).all())

    def for_rank(self, rank: int, lot: int) -> RankTransfers:
        """What `rank` does for `lot`; reads nothing of other ranks."""
        place = self._index(rank, lot)
        first, last = self._arrivals[place : place + 2].tolist()
        here = first + int(np.searchsorted(self.moves.round[first:last], 0))
        sends, receives = self._sends(place), self._receives(here, last)
        rounds = range(self.rounds(lot))
        slots = self._slots_to_fill(first, last)
        return RankTransfers(
            rounds=tuple(RoundTransfers(sends.get(r), receives.get(r)) for r in rounds),
            local=LocalCopies(
                sources=self._slots_read(np.arange(first, here)),
                staging=tuple(self.moves.staging[first:here].tolist()),
                slots=slots[: here - first],
            ),
            copies=tuple(zip(self.moves.staging[first:last].tolist(), slots, strict=True)),
        )

    def _index(self, rank: int, lot: int) -> int:
        return self._check_chunk(lot) * self.shape.ranks + _check_range(
            "rank", rank, self.shape.ranks
        )

    def _check_chunk(self, lot: int) -> int:
        return _check_range("lot", lot, self.chunks)

    def _sends(self, place: int) -> dict[int, Send]:
        """By round."""
        first, last = self._leaving[place : place + 2].tolist()
        mine = self._departures[first:last]
        rounds, peers = self.moves.round[mine], self.moves.slot[mine] // self.shape.slots_per_rank
        slots = self._slots_read(mine)
        return {int(rounds[a]): Send(int(peers[a]), slots[a:b]) for a, b in _runs(rounds)}

    def _receives(self, first: int, last: int) -> dict[int, Recv]:
        """By round."""
        rounds = self.moves.round[first:last]
        peers = self.moves.source[first:last] // self.shape.slots_per_rank
        staging, slots = self.moves.staging[first:last].tolist(), self._slots_to_fill(first, last)
        return {
            int(rounds[a]): Recv(int(peers[a]), tuple(staging[a:b]), slots[a:b])
            for a, b in _runs(rounds)
        }

    def _slots_read(self, moves: npt.NDArray[np.integer]) -> tuple[int, ...]:
        """Local slots, on the senders, that `moves` read."""
        return self._local(self.moves.layer[moves], self.moves.source[moves])

    def _slots_to_fill(self, first: int, last: int) -> tuple[int, ...]:
        """Local slots that these moves fill."""
        return self._local(self.moves.layer[first:last], self.moves.slot[first:last])

    def _local(self, layers: Ids, slots: Ids) -> tuple[int, ...]:
        per_rank = self.shape.slots_per_rank
        return tuple((layers * per_rank + slots % per_rank).tolist())


def _check_range(what: str, number: int, count: int) -> int:
    """The number itself; one below 0 would be counted from the end."""
    if not 0 <= number < count:
        raise ValueError(f"{what}: expected 0 to {count - 1}, got {number}")
    return number


def _runs(rounds: Ids) -> list[tuple[int, int]]:
    """Where each run of equal values begins and ends."""
    borders = np.flatnonzero(np.diff(rounds, prepend=-1, append=-1)).tolist()
    return list(pairwise(borders))


def plan_migration(
    installed: Placement,
    proposed: Placement,
    order: Sequence[int] | Ids,
    shape: ExpertShape,
    *,
    nodes: int = 1,
    staging: int,
    parcel: int,
) -> MigrationPlan:
    """Every rank gets the same answer from the same arguments.

    A layer is atomic: one that fills more than `staging` slots of a rank is refused, so the planner
    does not propose it.

    Args:
        installed: int32 (layers, slots), the expert in each slot now.
        proposed: likewise, what shall be installed.
        order: every layer that changes, once, best gain first; one that does not is of some lot.
        shape: how many of everything.
        nodes: of as many ranks each; rank r is on node r // (ranks // nodes).
        staging: staging buffers of a rank, in slots.
        parcel: most slots of a blob.

    Raises:
        PlacementError: what does not fit, in one line.
    """
    if np.shape(installed) != (shape.layers, shape.slots):
        raise PlacementError(
            f"installed: expected {(shape.layers, shape.slots)}, got {np.shape(installed)}"
        )
    layers = _layers(order)
    try:
        found = _native.ship(
            installed, proposed, layers, shape.experts, shape.ranks, nodes, staging, parcel
        )
    except ValueError as refused:
        raise PlacementError(str(refused)) from None
    return _migration_plan(shape, staging, layers, *found)


def _layers(order: Sequence[int] | Ids) -> Ids:
    try:
        return np.array([index(layer) for layer in order], dtype=np.int32)
    except OverflowError:
        raise PlacementError(f"order: a layer is beyond 32 bits: {list(order)}") from None


def _migration_plan(
    shape: ExpertShape, staging: int, layers: Ids, rows: Ids, *places: Ids
) -> MigrationPlan:
    """From what the native core returns; nobody may write to it."""
    for array in (layers, rows, *places):
        array.flags.writeable = False
    moves, arrivals = SlotMoves(*rows.reshape(6, -1)), places[0]
    needs = np.diff(arrivals).reshape(-1, shape.ranks)
    needs.flags.writeable = False
    return MigrationPlan(shape, staging, moves, layers, needs, *places)
