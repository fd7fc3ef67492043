"""Family *kernels*: tables, and weights with them, that change while they are read."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance.context import NEXT, Play, RankContext, require, to_host
from equipoise.hal.conformance.fixtures import routing_tables
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.kernels import Salt, Tables
from equipoise.hal.routing import RoutingTable, route_hashed
from equipoise.hal.routing_rules import BlockTurns, route_by_block_turns
from equipoise.hal.slots import Segment, SlotLayout, SlotStore
from equipoise.hal.stream import Event, Role, Stream

FAMILY = "kernels"
PLACEMENTS = ((0, 0, 0, 1), (1, 1, 1, 0), (1, 0, 0, 1))
"""No two have an array of the table in common."""
WEIGHTS = ((1, 1, 1, 1), (1, 2, 3, 4), (4, 3, 2, 1))
EXPERTS, SLOTS, TABLE_TOKENS = 2, 4, 32
SALT = Salt(rank=0, layer=0, step=0)
RULE = BlockTurns(offset=0)
MAX_TABLE_STEPS = 7


@cache
def _table(kind: int) -> RoutingTable:
    return routing_tables.make_table(PLACEMENTS[kind], WEIGHTS[kind])


def _table_programs(_: Traits) -> st.SearchStrategy[Program]:
    """Commits of one of the tables, and reads; the first is a commit."""
    kind = st.integers(0, len(PLACEMENTS) - 1)
    commit = kind.map(lambda kind: Step("commit", (kind,)))
    steps = st.lists(st.one_of(commit, st.just(Step("read"))), max_size=MAX_TABLE_STEPS)
    return st.builds(lambda first, following: make_program([first, *following]), commit, steps)


@dataclass
class _TableRunner:
    """Commits on one stream, reads on another.

    A read may overlap one commit, never two: the second one fills the set that the read
    has chosen. So a read comes after the commits issued before it, and a commit after the reads
    that were issued before the commit before it.
    """

    ctx: RankContext
    tables: Tables
    last_read: Event | None = None
    last_commit: Event | None = None
    keepalive: list[object] = field(default_factory=list)

    def commit(self, kind: int) -> None:
        copy, compute = (self.ctx.accelerator.stream(role) for role in (Role.COPY, Role.COMPUTE))
        if self.last_read is not None:
            copy.wait(self.last_read)
        self.last_read = self.ctx.accelerator.event()
        compute.record(self.last_read)
        update = routing_tables.make_update(0, _table(kind))
        self.keepalive.append(update)
        self.ctx.accelerator.kernels.commit_tables(update, self.tables, copy)
        self.last_commit = self.ctx.accelerator.event()
        copy.record(self.last_commit)

    def read(self, how: "Read") -> Tensor:
        compute = self.ctx.accelerator.stream(Role.COMPUTE)
        if self.last_commit is not None:
            compute.wait(self.last_commit)
        self.ctx.inject_delay(compute)
        return how(self)


Read = Callable[[_TableRunner], Tensor]
"""Launches a read on the compute stream; returns the buffer of its result."""


def _read_tables(runner: _TableRunner) -> Tensor:
    """Do as a routing kernel does: take the word once, then the arrays of its set."""
    ctx, live = runner.ctx, runner.tables
    parts = (live.start, live.replicas, live.cumulative)
    out = ctx.empty((EXPERTS + 1 + 2 * SLOTS,), torch.int32)

    def make_program() -> None:
        word = live.generation[:1] & 1
        torch.cat([part[:, 0].index_select(0, word)[0] for part in parts], out=out)

    ctx.accelerator.stream(Role.COMPUTE).launch(make_program)
    return out


@cache
def _expected_tables(kind: int) -> tuple[int, ...]:
    """What a look at these tables sees."""
    table = _table(kind)
    return tuple(torch.cat([table.start, table.replicas, table.cumulative]).tolist())


def _ids() -> Tensor:
    return torch.arange(TABLE_TOKENS, dtype=torch.int32) % EXPERTS


def _read_routing(runner: _TableRunner) -> Tensor:
    ctx, stream = runner.ctx, runner.ctx.accelerator.stream(Role.COMPUTE)
    ids = ctx.copy_of(_ids())
    out = routing_tables.launch_routing(ctx, ids, runner.tables, SALT, stream)
    runner.keepalive += [ids, out]  # a kernel owns nothing: what it counts lands here, too
    return out.slots


@cache
def _expected_routing(kind: int) -> tuple[int, ...]:
    """Where these tables send the tokens."""
    return tuple(route_hashed(_ids(), _table(kind), SALT.rank, SALT.layer, SALT.step)[0].tolist())


def _read_rule_routing(runner: _TableRunner) -> Tensor:
    ctx, stream = runner.ctx, runner.ctx.accelerator.stream(Role.COMPUTE)
    ids, out = ctx.copy_of(_ids()), routing_tables.empty_output(ctx, TABLE_TOKENS, EXPERTS)
    ctx.accelerator.kernels.route_by_rule(
        RULE, ids, runner.tables, SALT.layer, out.slots, out.counts, stream
    )
    runner.keepalive += [ids, out]
    return out.slots


@cache
def _expected_rule_routing(kind: int) -> tuple[int, ...]:
    """Where the rule sends the tokens by these tables."""
    return tuple(route_by_block_turns(_ids(), _table(kind), RULE)[0].tolist())


def _play_commits(
    ctx: RankContext,
    program: Program,
    clause: str,
    read: Read,
    expected: Callable[[int], tuple[int, ...]],
) -> Play:
    runner = _TableRunner(ctx, routing_tables.zeroed_tables(ctx, 1, EXPERTS, SLOTS, 1))
    reads: list[tuple[int, Tensor]] = []
    kinds: list[int] = []
    for step in program.steps:
        if step.op == "commit":
            kinds.append(int(step.args[0]))
            runner.commit(kinds[-1])
        else:
            reads.append((len(kinds) - 1, runner.read(read)))
        yield NEXT
    ctx.drain()
    for number, (latest, contents) in enumerate(reads):
        allowed = {expected(kind) for kind in kinds[latest : latest + 2]}
        what = f"read {number} comes after commit {latest}, beside at most the next: it sees"
        require(
            clause,
            tuple(contents.tolist()) in allowed,
            f"{what} {contents.tolist()}, not {allowed}",
        )


def _play_table_reads(ctx: RankContext, program: Program) -> Play:
    return _play_commits(ctx, program, "G2", _read_tables, _expected_tables)


def _play_routing(ctx: RankContext, program: Program) -> Play:
    return _play_commits(ctx, program, "G1", _read_routing, _expected_routing)


def _play_rule_routing(ctx: RankContext, program: Program) -> Play:
    return _play_commits(ctx, program, "G1", _read_rule_routing, _expected_rule_routing)


COMMITTED = Property(
    name="a-commit-of-tables-writes-the-word-last",
    family=FAMILY,
    clauses=("G2",),
    claim="Who takes the word and reads its set finds the tables of one commit, whole.",
    programs=_table_programs,
    play=_play_table_reads,
)
ONE_GENERATION = Property(
    name="a-routing-pass-reads-one-generation",
    family=FAMILY,
    clauses=("G1",),
    claim="A routing pass beside a commit routes by the old tables or by the new ones.",
    programs=_table_programs,
    play=_play_routing,
)
ONE_GENERATION_BY_RULE = Property(
    name="a-pass-by-a-rule-reads-one-generation",
    family=FAMILY,
    clauses=("G1",),
    claim="So does a pass by another engine's rule.",
    programs=_table_programs,
    play=_play_rule_routing,
)


WEIGHT_EXPERTS, WEIGHT_SLOTS, SLOT_BYTES, WEIGHT_TOKENS = 2, 3, 8, 8
INITIAL_PLACEMENT = (0, 1, 0)
"""Placement at the beginning."""
MAX_WEIGHT_STEPS = 8


def _weight_programs(_: Traits) -> st.SearchStrategy[Program]:
    """New placements, committed on the reader's own stream or on another, and reads."""
    placement = st.lists(
        st.integers(0, WEIGHT_EXPERTS - 1), min_size=WEIGHT_SLOTS, max_size=WEIGHT_SLOTS
    )
    role = st.sampled_from((Role.COMPUTE.value, Role.COPY.value))
    place = st.builds(lambda role, placement: Step("place", (role, *placement)), role, placement)
    steps = st.lists(st.one_of(place, st.just(Step("read"))), min_size=2, max_size=MAX_WEIGHT_STEPS)
    return steps.map(lambda steps: make_program(filter(_has_every_expert, steps)))


def _has_every_expert(step: Step) -> bool:
    """Whether every expert has a slot."""
    return step.op == "read" or len(set(step.args[1:])) == WEIGHT_EXPERTS


@dataclass
class _LayerRunner:
    """Weights and tables of a layer on one rank; expert e's weights are e + 1 in every byte."""

    ctx: RankContext
    weights: Tensor
    store: SlotStore
    routing_tables: Tables
    ids: Tensor
    placement: list[int] = field(default_factory=lambda: list(INITIAL_PLACEMENT))
    keepalive: list[object] = field(default_factory=list)

    def stream(self, role: str) -> Stream:
        return self.ctx.accelerator.stream(Role(role))

    def place(self, role: str, *placement: int) -> Play:
        """Commit the slots that change, and the tables, between two reads."""
        stream, compute = self.stream(role), self.stream(Role.COMPUTE)
        moved = [slot for slot in range(WEIGHT_SLOTS) if placement[slot] != self.placement[slot]]
        blob = self.ctx.copy_of(_weights(placement)[moved]).reshape(-1)
        self.keepalive.append(blob)
        self.store.unpack(blob, range(len(moved)), stream)
        self.order_after(stream, compute)
        yield NEXT
        self.store.commit(list(enumerate(moved)), stream)
        yield NEXT
        self.commit_tables(placement, stream)
        self.order_after(compute, stream)
        self.placement = list(placement)

    def commit_tables(self, placement: tuple[int, ...], stream: Stream) -> None:
        update = routing_tables.make_update(
            0, routing_tables.make_table(placement, [1] * WEIGHT_SLOTS)
        )
        self.keepalive.append(update)
        self.ctx.accelerator.kernels.commit_tables(update, self.routing_tables, stream)

    def order_after(self, later: Stream, earlier: Stream) -> None:
        """What is launched on `later` from now on comes after what is on `earlier`."""
        if later is not earlier:
            event = self.ctx.accelerator.event()
            earlier.record(event)
            later.wait(event)

    def read(self) -> Tensor:
        """Route, then read a byte of the slot that each token is sent to."""
        compute = self.stream(Role.COMPUTE)
        out = routing_tables.launch_routing(
            self.ctx, self.ids, self.routing_tables, Salt(0, 0, 0), compute
        )
        output = self.ctx.empty((WEIGHT_TOKENS, SLOT_BYTES))
        self.keepalive.append(out)

        def make_program() -> None:
            slots = out.slots.long().clamp(0, WEIGHT_SLOTS - 1)
            torch.index_select(self.weights, 0, slots, out=output)

        compute.launch(make_program)
        return output


def _weights(placement: tuple[int, ...]) -> Tensor:
    """uint8 [len(placement), SLOT_BYTES]."""
    return torch.tensor(placement, dtype=torch.uint8)[:, None].add(1).repeat(1, SLOT_BYTES)


def _layer_runner(ctx: RankContext) -> _LayerRunner:
    weights = ctx.copy_of(_weights(INITIAL_PLACEMENT))
    layout = SlotLayout(tuple((Segment("weight", row),) for row in weights), staging=WEIGHT_SLOTS)
    live = routing_tables.zeroed_tables(ctx, 1, WEIGHT_EXPERTS, WEIGHT_SLOTS, 1)
    ids = ctx.copy_of(torch.arange(WEIGHT_TOKENS, dtype=torch.int32) % WEIGHT_EXPERTS)
    layer = _LayerRunner(ctx, weights, ctx.accelerator.slot_store(layout), live, ids)
    layer.commit_tables(INITIAL_PLACEMENT, layer.stream(Role.COMPUTE))
    return layer


def _play_weights(ctx: RankContext, program: Program) -> Play:
    layer, reads = _layer_runner(ctx), []
    for step in program.steps:
        if step.op == "read":
            reads.append(layer.read())
        else:
            yield from layer.place(str(step.args[0]), *(int(expert) for expert in step.args[1:]))
        yield NEXT
    ctx.drain()
    expected = (to_host(layer.ids) + 1).to(torch.uint8)
    for number, output in enumerate(reads):
        wrong = (to_host(output) != expected[:, None]).any(1).nonzero().flatten().tolist()
        require("V3", not wrong, f"read {number}: tokens {wrong} find another expert's weights")


TABLES_AND_WEIGHTS = Property(
    name="tables-and-weights-of-a-layer-change-together",
    family="kernels",
    clauses=("V3",),
    claim="Between two reads, a layer's slots and its tables change together.",
    programs=_weight_programs,
    play=_play_weights,
)
