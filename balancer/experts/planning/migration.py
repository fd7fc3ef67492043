"""Plans how the weights of a rebalance travel: chunks, sources, rounds, staging buffers.

Ordering and proofs are in docs/design/migration.md; the work is done in
csrc/migration/migration_plan.h, without the interpreter's lock.

- A *chunk* is the layers that are staged, verified and committed together. At most two are in
  flight: one is transferred while the other is voted on. They are committed in order.
- In a *round* of a chunk, a rank sends at most one message and receives at most one.
- A *message* is the slots that go from one rank to another in one round, by layer and slot.
- A *local slot* is layer * slots_per_rank + slot % slots_per_rank, as the slot store numbers them.
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
    """A message to `peer`, packed from these local slots in this order."""

    peer: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Recv:
    """A message from `peer`, unpacked to staging buffers, to be committed to local slots.

    The buffers are consecutive.
    """

    peer: int
    staging: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class RoundTransfers:
    """What a rank sends and receives in one round; nothing if both are None."""

    send: Send | None
    receive: Recv | None


@dataclass(frozen=True)
class LocalCopies:
    """Copies within a rank; at each position: local slot read, buffer, local slot filled."""

    sources: tuple[int, ...]
    staging: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class RankTransfers:
    """What one rank does for one chunk.

    Attributes:
        rounds: the same number on every rank.
        local: copies within the rank. They go through staging too: a swap would overwrite its own
            source.
        copies: (staging buffer, local slot) pairs that the commit copies on this rank.
    """

    rounds: tuple[RoundTransfers, ...]
    local: LocalCopies
    copies: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SlotMoves:
    """Every slot that gets another expert, int32 [moves] each, sorted by chunk and rank.

    Attributes:
        layer: layer of the slot.
        slot: the slot that is filled.
        expert: the expert that it gets.
        source: the slot of the same layer that is read.
        staging: buffer, on the slot's rank, that holds the copy until its commit.
        round: round of its chunk; -1 if the copy stays on its rank.
    """

    layer: Ids
    slot: Ids
    expert: Ids
    source: Ids
    staging: Ids
    round: Ids


@dataclass(frozen=True, eq=False)
class MigrationPlan:
    """The migration plan of a rebalance, the same on every rank; see `plan_migration`.

    Methods raise ValueError for a rank or chunk that does not exist.

    Attributes:
        shape: numbers of layers, experts, slots and ranks.
        staging: staging buffers per rank.
        moves: all copies.
        layer_order: int32 [layers that may change], in order of chunks.
        staging_needed: int32 [chunks, ranks], buffers that a chunk fills.
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
        """Number of chunks."""
        return len(self._rounds)

    @property
    def total_copies(self) -> int:
        """Number of copies, including those within a rank."""
        return len(self.moves.slot)

    @property
    def remote_copies(self) -> int:
        """Number of copies between ranks."""
        return len(self._departures)

    def remote_copies_in(self, chunks: int) -> int:
        """Returns the number of copies between ranks in the first `chunks` chunks."""
        last = int(self._arrivals[chunks * self.shape.ranks])
        return int((self.moves.round[:last] >= 0).sum())

    def layers(self, chunk: int) -> tuple[int, ...]:
        """Returns the layers of a chunk, in the planned order."""
        chunk = self._check_chunk(chunk)
        first, last = self._chunk_starts[chunk : chunk + 2].tolist()
        return tuple(self.layer_order[first:last].tolist())

    def rounds(self, chunk: int) -> int:
        """Returns the rounds of a chunk: the most messages that a rank sends or receives in it."""
        return int(self._rounds[self._check_chunk(chunk)])

    def fits_with(self, chunk: int, other: int) -> bool:
        """Returns whether two chunks may be in flight together.

        Chunks are started and committed in order, so only neighbours can be; they may if no rank
        needs more buffers for both than it has.
        """
        both = (
            self.staging_needed[self._check_chunk(chunk)]
            + self.staging_needed[self._check_chunk(other)]
        )
        return abs(chunk - other) == 1 and bool((both <= self.staging).all())

    def for_rank(self, rank: int, chunk: int) -> RankTransfers:
        """Returns what `rank` does for `chunk`."""
        index = self._index(rank, chunk)
        first, last = self._arrivals[index : index + 2].tolist()
        first_remote = first + int(np.searchsorted(self.moves.round[first:last], 0))
        sends, receives = self._sends(index), self._receives(first_remote, last)
        rounds = range(self.rounds(chunk))
        slots = self._slots_to_fill(first, last)
        return RankTransfers(
            rounds=tuple(RoundTransfers(sends.get(r), receives.get(r)) for r in rounds),
            local=LocalCopies(
                sources=self._slots_read(np.arange(first, first_remote)),
                staging=tuple(self.moves.staging[first:first_remote].tolist()),
                slots=slots[: first_remote - first],
            ),
            copies=tuple(zip(self.moves.staging[first:last].tolist(), slots, strict=True)),
        )

    def _index(self, rank: int, chunk: int) -> int:
        return self._check_chunk(chunk) * self.shape.ranks + _check_range(
            "rank", rank, self.shape.ranks
        )

    def _check_chunk(self, chunk: int) -> int:
        return _check_range("chunk", chunk, self.chunks)

    def _sends(self, index: int) -> dict[int, Send]:
        """Returns what a rank sends, by round."""
        first, last = self._leaving[index : index + 2].tolist()
        moves = self._departures[first:last]
        rounds, peers = self.moves.round[moves], self.moves.slot[moves] // self.shape.slots_per_rank
        slots = self._slots_read(moves)
        return {int(rounds[a]): Send(int(peers[a]), slots[a:b]) for a, b in _runs(rounds)}

    def _receives(self, first: int, last: int) -> dict[int, Recv]:
        """Returns what a rank receives, by round."""
        rounds = self.moves.round[first:last]
        peers = self.moves.source[first:last] // self.shape.slots_per_rank
        staging, slots = self.moves.staging[first:last].tolist(), self._slots_to_fill(first, last)
        return {
            int(rounds[a]): Recv(int(peers[a]), tuple(staging[a:b]), slots[a:b])
            for a, b in _runs(rounds)
        }

    def _slots_read(self, moves: npt.NDArray[np.integer]) -> tuple[int, ...]:
        """Returns the local slots, on the senders, that `moves` read."""
        return self._local(self.moves.layer[moves], self.moves.source[moves])

    def _slots_to_fill(self, first: int, last: int) -> tuple[int, ...]:
        """Returns the local slots that moves `first` to `last` fill."""
        return self._local(self.moves.layer[first:last], self.moves.slot[first:last])

    def _local(self, layers: Ids, slots: Ids) -> tuple[int, ...]:
        per_rank = self.shape.slots_per_rank
        return tuple((layers * per_rank + slots % per_rank).tolist())


def _check_range(name: str, number: int, count: int) -> int:
    """Checks an index; a negative one would count from the end."""
    if not 0 <= number < count:
        raise ValueError(f"{name}: expected 0 to {count - 1}, got {number}")
    return number


def _runs(rounds: Ids) -> list[tuple[int, int]]:
    """Returns the begin and end of each run of equal values."""
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
    slots_per_message: int,
) -> MigrationPlan:
    """Plans the migration; all ranks get the same plan from the same arguments.

    A layer is committed as a whole: one that fills more than `staging` slots of a rank is refused,
    so the planner must not propose it.

    Args:
        installed: int32 (layers, slots), the expert in each slot now.
        proposed: int32 (layers, slots), the expert in each slot afterwards.
        order: every layer that changes, once, best gain first; unchanged layers are allowed.
        shape: numbers of layers, experts, slots and ranks.
        nodes: number of nodes; rank r is on node r // (ranks // nodes).
        staging: staging buffers per rank, in slots.
        slots_per_message: maximum number of slots in a message.

    Raises:
        PlacementError: the arguments do not fit together.
    """
    if np.shape(installed) != (shape.layers, shape.slots):
        raise PlacementError(
            f"installed: expected {(shape.layers, shape.slots)}, got {np.shape(installed)}"
        )
    layers = _layers(order)
    try:
        native_plan = _native.plan_migration(
            installed,
            proposed,
            layers,
            shape.experts,
            shape.ranks,
            nodes,
            staging,
            slots_per_message,
        )
    except ValueError as refused:
        raise PlacementError(str(refused)) from None
    return _migration_plan(shape, staging, layers, *native_plan)


def _layers(order: Sequence[int] | Ids) -> Ids:
    try:
        return np.array([index(layer) for layer in order], dtype=np.int32)
    except OverflowError:
        raise PlacementError(f"order: a layer is beyond 32 bits: {list(order)}") from None


def _migration_plan(
    shape: ExpertShape, staging: int, layers: Ids, rows: Ids, *places: Ids
) -> MigrationPlan:
    """Builds the plan from the arrays of the native core, which become read-only."""
    for array in (layers, rows, *places):
        array.flags.writeable = False
    moves, arrivals = SlotMoves(*rows.reshape(6, -1)), places[0]
    needs = np.diff(arrivals).reshape(-1, shape.ranks)
    needs.flags.writeable = False
    return MigrationPlan(shape, staging, moves, layers, needs, *places)
