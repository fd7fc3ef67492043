"""Family *kernels*: tables that change while somebody reads them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance import routes
from equipoise.hal.conformance.bench import NEXT, Bench, Play, demand
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.kernels import Salt, Tables
from equipoise.hal.routing import RoutingTable, route_hashed
from equipoise.hal.routing_rules import BlockTurns, route_by_block_turns
from equipoise.hal.stream import Event, Role

FAMILY = "kernels"
PLACEMENTS = ((0, 0, 0, 1), (1, 1, 1, 0), (1, 0, 0, 1))
"""No two have an array of the table in common."""
WEIGHTS = ((1, 1, 1, 1), (1, 2, 3, 4), (4, 3, 2, 1))
EXPERTS, SLOTS, TOKENS = 2, 4, 32
SALT = Salt(rank=0, layer=0, step=0)
RULE = BlockTurns(offset=0)
MOST_STEPS = 7


@cache
def _table(kind: int) -> RoutingTable:
    return routes.table(PLACEMENTS[kind], WEIGHTS[kind])


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    """Commits of one of the tables, and reads; the first is a commit."""
    kind = st.integers(0, len(PLACEMENTS) - 1)
    commit = kind.map(lambda kind: Step("commit", (kind,)))
    steps = st.lists(st.one_of(commit, st.just(Step("read"))), max_size=MOST_STEPS)
    return st.builds(lambda first, rest: program([first, *rest]), commit, steps)


@dataclass
class _Desk:
    """Commits on one stream, reads on another.

    A read may run beside one commit, never beside two: the second one fills the set that the read
    has chosen. So a read comes after the commits issued before it, and a commit after the reads
    that were issued before the commit before it.
    """

    bench: Bench
    live: Tables
    read_by: Event | None = None
    committed: Event | None = None
    kept: list[object] = field(default_factory=list)

    def commit(self, kind: int) -> None:
        copy, compute = (self.bench.accelerator.stream(role) for role in (Role.COPY, Role.COMPUTE))
        if self.read_by is not None:
            copy.wait(self.read_by)
        self.read_by = self.bench.accelerator.event()
        compute.record(self.read_by)
        made = routes.update(0, _table(kind))
        self.kept.append(made)
        self.bench.accelerator.kernels.commit_tables(made, self.live, copy)
        self.committed = self.bench.accelerator.event()
        copy.record(self.committed)

    def read(self, how: "Read") -> Tensor:
        compute = self.bench.accelerator.stream(Role.COMPUTE)
        if self.committed is not None:
            compute.wait(self.committed)
        self.bench.disturb(compute)
        return how(self)


Read = Callable[[_Desk], Tensor]
"""Launches a read on the compute stream; where its result will stand."""


def _look(desk: _Desk) -> Tensor:
    """Do as a routing kernel does: take the word once, then the arrays of its set."""
    bench, live = desk.bench, desk.live
    parts = (live.start, live.replicas, live.cumulative)
    out = bench.empty((EXPERTS + 1 + 2 * SLOTS,), torch.int32)

    def program() -> None:
        word = live.generation[:1] & 1
        torch.cat([part[:, 0].index_select(0, word)[0] for part in parts], out=out)

    bench.accelerator.stream(Role.COMPUTE).launch(program)
    return out


@cache
def _looked(kind: int) -> tuple[int, ...]:
    """What a look at these tables sees."""
    made = _table(kind)
    return tuple(torch.cat([made.start, made.replicas, made.cumulative]).tolist())


def _ids() -> Tensor:
    return torch.arange(TOKENS, dtype=torch.int32) % EXPERTS


def _route(desk: _Desk) -> Tensor:
    bench, stream = desk.bench, desk.bench.accelerator.stream(Role.COMPUTE)
    ids = bench.of(_ids())
    out = routes.route(bench, ids, desk.live, SALT, stream)
    desk.kept += [ids, out]  # a kernel owns nothing: what it counts lands here, too
    return out.slots


@cache
def _routed(kind: int) -> tuple[int, ...]:
    """Where these tables send the tokens."""
    return tuple(route_hashed(_ids(), _table(kind), SALT.rank, SALT.layer, SALT.step)[0].tolist())


def _route_by_rule(desk: _Desk) -> Tensor:
    bench, stream = desk.bench, desk.bench.accelerator.stream(Role.COMPUTE)
    ids, out = bench.of(_ids()), routes.routed(bench, TOKENS, EXPERTS)
    bench.accelerator.kernels.route_by_rule(
        RULE, ids, desk.live, SALT.layer, out.slots, out.counts, stream
    )
    desk.kept += [ids, out]
    return out.slots


@cache
def _ruled(kind: int) -> tuple[int, ...]:
    """Where the rule sends the tokens by these tables."""
    return tuple(route_by_block_turns(_ids(), _table(kind), RULE)[0].tolist())


def _play(
    bench: Bench, found: Program, clause: str, read: Read, due: Callable[[int], tuple[int, ...]]
) -> Play:
    desk = _Desk(bench, routes.tables(bench, 1, EXPERTS, SLOTS, 1))
    reads: list[tuple[int, Tensor]] = []
    kinds: list[int] = []
    for step in found.steps:
        if step.op == "commit":
            kinds.append(int(step.args[0]))
            desk.commit(kinds[-1])
        else:
            reads.append((len(kinds) - 1, desk.read(read)))
        yield NEXT
    bench.drain()
    for number, (latest, seen) in enumerate(reads):
        allowed = {due(kind) for kind in kinds[latest : latest + 2]}
        what = f"read {number} comes after commit {latest}, beside at most the next: it sees"
        demand(clause, tuple(seen.tolist()) in allowed, f"{what} {seen.tolist()}, not {allowed}")


def _play_looks(bench: Bench, found: Program) -> Play:
    return _play(bench, found, "G2", _look, _looked)


def _play_routes(bench: Bench, found: Program) -> Play:
    return _play(bench, found, "G1", _route, _routed)


def _play_rules(bench: Bench, found: Program) -> Play:
    return _play(bench, found, "G1", _route_by_rule, _ruled)


COMMITTED = Property(
    name="a-commit-of-tables-writes-the-word-last",
    family=FAMILY,
    clauses=("G2",),
    claim="Who takes the word and reads its set finds the tables of one commit, whole.",
    programs=_programs,
    play=_play_looks,
)
ONE_GENERATION = Property(
    name="a-routing-pass-reads-one-generation",
    family=FAMILY,
    clauses=("G1",),
    claim="A routing pass beside a commit routes by the old tables or by the new ones.",
    programs=_programs,
    play=_play_routes,
)
ONE_GENERATION_BY_RULE = Property(
    name="a-pass-by-a-rule-reads-one-generation",
    family=FAMILY,
    clauses=("G1",),
    claim="So does a pass by another engine's rule.",
    programs=_programs,
    play=_play_rules,
)
