"""Changes of placement, and reference computations of migration plans in plain Python."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from equipoise.balancer.experts.placement import ExpertShape, Placement
from equipoise.balancer.experts.planning.migration import MigrationPlan, plan_migration


@dataclass(frozen=True)
class Change:
    """Arguments of `plan_migration`; the layers of `order` do not need more than `staging`."""

    installed: Placement
    proposed: Placement
    order: tuple[int, ...]
    shape: ExpertShape
    nodes: int
    staging: int
    slots_per_message: int

    def plan(self) -> MigrationPlan:
        return plan_migration(
            self.installed,
            self.proposed,
            self.order,
            self.shape,
            nodes=self.nodes,
            staging=self.staging,
            slots_per_message=self.slots_per_message,
        )

    def needs(self, layers: Sequence[int]) -> list[int]:
        """Staging buffers of each rank for these layers."""
        differs = self.installed[list(layers)] != self.proposed[list(layers)]
        by_rank = differs.reshape(len(layers), self.shape.ranks, -1)
        counts: list[int] = by_rank.sum(axis=(0, 2)).tolist()
        return counts

    def rank(self, slot: int) -> int:
        return slot // self.shape.slots_per_rank

    def node(self, slot: int) -> int:
        return slot // (self.shape.slots // self.nodes)

    def choices(self, layer: int, slot: int) -> list[int]:
        """Slots that the move to this one may read: of its rank, else its node, else any."""
        expert = self.proposed[layer, slot]
        holders: list[int] = np.flatnonzero(self.installed[layer] == expert).tolist()
        own = [s for s in holders if self.rank(s) == self.rank(slot)]
        near = [s for s in holders if self.node(s) == self.node(slot)]
        return own or near or holders

    def changes(self) -> Iterator[tuple[int, int]]:
        """(layer, slot) whose expert changes, in the order of layers, then slots."""
        for layer in self.order:
            row = self.installed[layer] != self.proposed[layer]
            yield from ((layer, int(slot)) for slot in np.flatnonzero(row))


@st.composite
def rows(draw: st.DrawFn, shape: ExpertShape) -> list[int]:
    """A layer: every expert has a slot."""
    spare = shape.slots - shape.experts
    expert = st.integers(0, shape.experts - 1)
    extra = draw(st.lists(expert, min_size=spare, max_size=spare))
    return draw(st.permutations([*range(shape.experts), *extra]))


@st.composite
def changes(draw: st.DrawFn, max_slots_per_message: int = 4, most_layers: int = 6) -> Change:
    """Up to 6 ranks on up to 6 nodes and 4 slots a rank; some layers do not change."""
    ranks, per_rank = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    slots = ranks * per_rank
    layers, experts = draw(st.integers(1, most_layers)), draw(st.integers(1, slots))
    shape = ExpertShape(layers, experts, slots, ranks)
    installed = [draw(rows(shape)) for _ in range(layers)]
    proposed = [draw(st.one_of(rows(shape), st.just(row))) for row in installed]
    before, after = np.array(installed, dtype=np.int32), np.array(proposed, dtype=np.int32)
    changed = [i for i in range(layers) if installed[i] != proposed[i] or draw(st.booleans())]
    largest = (before != after).reshape(layers, ranks, per_rank).sum(axis=2).max()
    return Change(
        installed=before,
        proposed=after,
        order=tuple(draw(st.permutations(changed))),
        shape=shape,
        nodes=draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0])),
        staging=max(1, int(largest)) + draw(st.integers(0, 2 * per_rank * layers)),
        slots_per_message=draw(st.integers(1, max_slots_per_message)),
    )


@dataclass(frozen=True)
class Route:
    """A move as the arrays of a migration plan have it."""

    layer: int
    slot: int
    expert: int
    source: int
    staging: int
    round: int


def routes(migration: MigrationPlan) -> list[Route]:
    """In the order of the arrays."""
    moves = migration.moves
    columns = moves.layer, moves.slot, moves.expert, moves.source, moves.staging, moves.round
    return [Route(*row) for row in np.stack(columns, axis=1).tolist()]


def by_chunk(migration: MigrationPlan) -> list[list[Route]]:
    """Returns the moves of each chunk."""
    chunk_of_layer = {layer: k for k in range(migration.chunks) for layer in migration.layers(k)}
    chunks: list[list[Route]] = [[] for _ in range(migration.chunks)]
    for route in routes(migration):
        chunks[chunk_of_layer[route.layer]].append(route)
    return chunks


def largest_degree(change: Change, moves: Sequence[Route]) -> int:
    """The most messages that one rank sends or receives: no schedule has fewer rounds."""
    pairs = Counter((change.rank(m.source), change.rank(m.slot)) for m in moves)
    degree: Counter[tuple[str, int]] = Counter()
    for (source, destination), count in pairs.items():
        if source != destination:
            degree["sends", source] += -(-count // change.slots_per_message)
            degree["receives", destination] += -(-count // change.slots_per_message)
    return max(degree.values(), default=0)


def fewest_sends(change: Change) -> int:
    """The lowest number of copies that the busiest sender can have: matchings, by Kuhn's method."""
    holders = [
        sorted({change.rank(s) for s in change.choices(layer, slot)})
        for layer, slot in change.changes()
        if change.rank(change.choices(layer, slot)[0]) != change.rank(slot)
    ]
    most = 0
    sends: dict[int, list[int]] = defaultdict(list)
    for move in range(len(holders)):
        while not _place(move, holders, sends, most, set()):
            most += 1
    return most


def _place(
    move: int, holders: list[list[int]], sends: dict[int, list[int]], most: int, visited: set[int]
) -> bool:
    for rank in holders[move]:
        if rank in visited:
            continue
        visited.add(rank)
        if len(sends[rank]) < most:
            sends[rank].append(move)
            return True
        for other in list(sends[rank]):
            if _place(other, holders, sends, most, visited):
                sends[rank].remove(other)
                sends[rank].append(move)
                return True
    return False
