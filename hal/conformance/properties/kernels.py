"""Family *kernels*: values of every kernel against the reference, and published routing rules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.checksum import as_int64, checksum
from equipoise.hal.conformance.context import (
    NEXT,
    Play,
    RankContext,
    require,
    require_equal,
    to_host,
)
from equipoise.hal.conformance.fixtures import routing_tables
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.properties.kernels_graphs import (
    GRAPHS,
    LONG_GRAPHS,
    REPLAY_STREAM,
    STREAM_ORDER,
)
from equipoise.hal.conformance.properties.kernels_large import LARGE_MODELS
from equipoise.hal.conformance.properties.kernels_operands import OPERANDS
from equipoise.hal.conformance.properties.kernels_tables import (
    COMMITTED,
    ONE_GENERATION,
    ONE_GENERATION_BY_RULE,
    TABLES_AND_WEIGHTS,
)
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.kernels import Kernels, Salt, Tables
from equipoise.hal.levelled_routing import GroupCounts, route_levelled
from equipoise.hal.routing import (
    RoutingTable,
    count_experts,
    route_apportioned,
    route_hashed,
    solve_cumulative,
)
from equipoise.hal.routing_rules import BlockTurns, ReplicaRule, RowHash, route_by_rule
from equipoise.hal.stream import Role, Stream

FAMILY = "kernels"
LAYERS = 2
EXPERTS = 3
SLOTS = 6
TOKENS = 64
REPEATS = (1, 40, 150)
"""How often the ids of a step follow each other: kernels run in blocks."""
COUNTERS = (0, 1, 2, 2**32 - 1)
"""Step counters."""
HASHED_RANKS = (0, 1, 2, 3, 9, 255, 256, 319)
"""Ranks that enter the hash; deployments have hundreds."""
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def _value_programs(_: Traits) -> st.SearchStrategy[Program]:
    """Tables of every layer, then calls of kernels, and further tables."""
    layers = st.integers(0, LAYERS - 1)
    first = st.tuples(*(_tables(st.just(layer)) for layer in range(LAYERS)))
    steps = st.lists(st.one_of(*_kernels(layers), _tables(layers)), min_size=1, max_size=6)
    ranks = st.sampled_from((1, 2, 3))
    return st.builds(
        lambda first, steps, ranks: make_program([*first, *steps], settings={"ranks": ranks}),
        first,
        steps,
        ranks,
    )


def _tables(layer: st.SearchStrategy[int]) -> st.SearchStrategy[Step]:
    """Every expert has a slot; the others, and the shares, are drawn."""
    spare = SLOTS - EXPERTS
    return st.builds(
        lambda layer, turn, experts, weights: Step("table", (layer, turn, *experts, *weights)),
        layer,
        st.integers(0, SLOTS - 1),
        st.lists(st.integers(0, EXPERTS - 1), min_size=spare, max_size=spare),
        st.lists(st.integers(0, 4), min_size=SLOTS, max_size=SLOTS),
    )


def _table(step: Step) -> tuple[RoutingTable, RoutingTable]:
    """What a table step installs, and the same slots with other shares."""
    turn, *numbers = (int(number) for number in step.args[1:])
    placement = [*range(EXPERTS), *numbers[: SLOTS - EXPERTS]]
    placement, weights = [*placement[turn:], *placement[:turn]], numbers[SLOTS - EXPERTS :]
    return routing_tables.make_table(placement, weights), routing_tables.make_table(
        placement, [4 - weight for weight in weights]
    )


def _kernels(layer: st.SearchStrategy[int]) -> tuple[st.SearchStrategy[Step], ...]:
    rank = st.sampled_from(HASHED_RANKS)
    counter, repeat = st.sampled_from(COUNTERS), st.sampled_from(REPEATS)
    expert = st.one_of(st.integers(-1, EXPERTS), st.sampled_from((INT32_MIN, INT32_MAX)))
    ids = st.lists(expert, max_size=8)
    counts = st.lists(st.integers(0, 1 << 24), min_size=EXPERTS, max_size=EXPERTS)
    content = st.lists(st.integers(0, 255), max_size=9)
    others = st.lists(st.integers(0, 300), min_size=EXPERTS, max_size=EXPERTS)

    def routing(op: str) -> st.SearchStrategy[Step]:
        return st.builds(
            lambda layer, rank, counter, repeat, ids: Step(
                op, (layer, rank, counter, repeat, *ids)
            ),
            layer,
            rank,
            counter,
            repeat,
            ids,
        )

    return (
        st.builds(lambda repeat, ids: Step("count", (repeat, *ids)), repeat, ids),
        st.builds(lambda repeat, data: Step("checksum", (repeat, *data)), repeat, content),
        st.builds(lambda layer, counts: Step("solve", (layer, *counts)), layer, counts),
        routing("hashed"),
        routing("apportioned"),
        routing("levelled"),
        st.builds(
            lambda layer, rank, repeat, before, after, ids: Step(
                "grouped", (layer, rank, repeat, *before, *after, *ids)
            ),
            layer,
            rank,
            repeat,
            others,
            others,
            ids,
        ),
    )


@dataclass
class _KernelValueRunner:
    """Kernels on the device, and the same tables on the host.

    Attributes:
        host_tables: tables by layer.
        solved_tables: the same with the shares of an apportioned pass.
        operands: what kernels that have not been waited for read, and what it held.
    """

    ctx: RankContext
    stream: Stream
    tables: Tables
    host_tables: dict[int, RoutingTable] = field(default_factory=dict)
    solved_tables: dict[int, RoutingTable] = field(default_factory=dict)
    operands: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def kernels(self) -> Kernels:
        return self.ctx.accelerator.kernels

    def operand(self, values: Tensor) -> Tensor:
        """What a kernel reads, on the device."""
        self.operands.append((self.ctx.copy_of(values), values))
        return self.operands[-1][0]

    def drain(self) -> None:
        """Wait for the kernels; they have only read their operands."""
        self.ctx.drain(self.stream)
        for operand, values in self.operands:
            require_equal("G11", operand, values, "an operand that a kernel reads")
        self.operands.clear()

    def run_step(self, step: Step) -> None:
        """Run one kernel to its end, and compare."""
        calls: dict[str, Callable[..., None]] = {
            "count": self.count,
            "checksum": self.checksum,
            "solve": self.solve,
            "hashed": self.hashed,
            "apportioned": self.apportioned,
            "levelled": self.levelled,
            "grouped": self.grouped,
        }
        if step.op == "table":
            self.install(int(step.args[0]), *_table(step))
        else:
            calls[step.op](*step.args)

    def install(self, layer: int, table: RoutingTable, solved: RoutingTable) -> None:
        self.host_tables[layer], self.solved_tables[layer] = table, solved
        self.kernels.commit_tables(
            routing_tables.make_update(layer, table), self.tables, self.stream
        )
        self.ctx.drain(self.stream)

    def count(self, repeat: int, *values: int) -> None:
        ids = _ids(repeat, values)
        out = routing_tables.empty_output(self.ctx, 0, EXPERTS)
        self.kernels.count(self.operand(ids), out.counts, self.stream)
        self.drain()
        self.judge_counts(ids, out.counts, "count")

    def checksum(self, repeat: int, *values: int) -> None:
        data = torch.tensor(values * repeat, dtype=torch.uint8)
        out = self.ctx.empty((1,), torch.int64)
        self.kernels.checksum(self.operand(data), out, self.stream)
        self.drain()
        expected = torch.tensor([as_int64(checksum(data))])
        require_equal("G4", out, expected, f"checksum of {data.numel()} bytes")

    def solve(self, layer: int, *values: int) -> None:
        counts, table = torch.tensor(values), self.host_tables[layer]
        out = self.ctx.empty((SLOTS,), torch.int32)
        self.kernels.solve_shares(self.operand(counts), self.tables, layer, out, self.stream)
        self.drain()
        expected = solve_cumulative(counts, table, self.tables.ranks)
        require_equal("G4", out, expected, f"shares for {values}")

    def hashed(self, layer: int, rank: int, counter: int, repeat: int, *values: int) -> None:
        ids, table = _ids(repeat, values), self.host_tables[layer]
        salt = Salt(rank, layer, counter)
        out = routing_tables.launch_routing(
            self.ctx, self.operand(ids), self.tables, salt, self.stream
        )
        self.drain()
        self.judge(ids, out, route_hashed(ids, table, rank, layer, counter)[0], f"hashed {salt}")

    def apportioned(self, layer: int, rank: int, counter: int, repeat: int, *values: int) -> None:
        ids, table = _ids(repeat, values), self.solved_tables[layer]
        salt = Salt(rank, layer, counter)
        out = routing_tables.empty_output(self.ctx, ids.numel(), EXPERTS)
        shares = self.operand(table.cumulative)
        self.kernels.route_apportioned(
            self.operand(ids), self.tables, shares, salt, out.slots, out.counts, self.stream
        )
        self.drain()
        self.judge(ids, out, route_apportioned(ids, table, rank, layer)[0], f"apportioned {salt}")

    def levelled(self, layer: int, rank: int, counter: int, repeat: int, *values: int) -> None:
        self.level(_ids(repeat, values), Salt(rank, layer, counter), None)

    def grouped(self, layer: int, rank: int, repeat: int, *numbers: int) -> None:
        """A batch between those of other ranks of its group."""
        before, after = (torch.tensor(numbers[k * EXPERTS :][:EXPERTS]).int() for k in range(2))
        ids = _ids(repeat, numbers[2 * EXPERTS :])
        total = before + count_experts(ids, EXPERTS) + after
        self.level(ids, Salt(rank, layer, 0), GroupCounts(total, before))

    def level(self, ids: Tensor, salt: Salt, group: GroupCounts | None) -> None:
        table, ranks = self.host_tables[salt.layer], self.tables.ranks
        copied = group and GroupCounts(self.operand(group.total), self.operand(group.before))
        out = routing_tables.empty_output(self.ctx, ids.numel(), EXPERTS)
        self.kernels.route_levelled(
            self.operand(ids), self.tables, salt, copied, out.slots, out.counts, self.stream
        )
        self.drain()
        expected = route_levelled(ids, table, ranks, salt.rank, salt.layer, group)[0]
        self.judge(ids, out, expected, f"levelled over {ranks} {salt}", "G13")

    def judge(
        self,
        ids: Tensor,
        out: routing_tables.RoutingOutput,
        expected: Tensor,
        what: str,
        clause: str = "G4",
    ) -> None:
        """First the padding, then every bit."""
        strays = to_host(out.slots)[(ids < 0) | (ids >= EXPERTS)]
        require("G6", bool((strays == SLOTS).all()), f"{what}: padding goes to {strays.tolist()}")
        self.judge_counts(ids, out.counts, what)
        require_equal(clause, out.slots, expected, f"{what}: slots")

    def judge_counts(self, ids: Tensor, counts: Tensor, what: str) -> None:
        expected = count_experts(ids, EXPERTS)
        extra = int(to_host(counts).sum()) - int(expected.sum())
        padding = ids.numel() - int(expected.sum())
        require("G6", not (padding and extra), f"{what}: {extra} of {padding} paddings are counted")
        require_equal("G4", counts, expected, f"{what}: counts")


def _ids(repeat: int, values: Sequence[int]) -> Tensor:
    return torch.tensor([*values] * repeat, dtype=torch.int32)


def _play_values(ctx: RankContext, program: Program) -> Play:
    live = routing_tables.zeroed_tables(ctx, LAYERS, EXPERTS, SLOTS, program.int_setting("ranks"))
    runner = _KernelValueRunner(ctx, ctx.accelerator.stream(Role.COMPUTE), live)
    for step in program.steps:
        runner.run_step(step)
        yield NEXT


def _salted_programs(_: Traits) -> st.SearchStrategy[Program]:
    """Routing passes over the same ids, by ranks and layers."""
    numbers = st.integers(0, 3), st.integers(0, LAYERS - 1)
    route = st.builds(lambda rank, layer: Step("route", (rank, layer)), *numbers)
    return st.lists(route, min_size=2, max_size=4, unique=True).map(make_program)


def _play_salted(ctx: RankContext, program: Program) -> Play:
    live = routing_tables.zeroed_tables(ctx, LAYERS, 1, 2, 1)
    stream = ctx.accelerator.stream(Role.COMPUTE)
    for layer in range(LAYERS):
        update = routing_tables.make_update(layer, routing_tables.make_table([0, 0], [1, 1]))
        ctx.accelerator.kernels.commit_tables(update, live, stream)
    ids = ctx.full((TOKENS,), 0, torch.int32)
    step_by_choices: dict[tuple[int, ...], Step] = {}
    for step in program.steps:
        rank, layer = (int(number) for number in step.args)
        out = routing_tables.launch_routing(ctx, ids, live, Salt(rank, layer, 0), stream)
        yield NEXT
        ctx.drain(stream)
        choices = tuple(out.slots.tolist())
        twin = step_by_choices.setdefault(choices, step)
        require("G5", twin is step, f"{step} makes the choices of {twin}, {TOKENS} out of {TOKENS}")


VALUES = Property(
    name="kernels-equal-the-reference",
    family=FAMILY,
    clauses=("G4", "G6", "G13", "G11"),
    claim="Every kernel returns the reference's values bit for bit, padding included, and only "
    "reads its operands.",
    programs=_value_programs,
    play=_play_values,
)
SALTED = Property(
    name="rank-and-layer-enter-the-routing-hash",
    family=FAMILY,
    clauses=("G5",),
    claim="The same ids on other ranks or layers go to other replicas.",
    programs=_salted_programs,
    play=_play_salted,
)


RULE_SLOTS = 7
RULE_PLACEMENT = (0, 1, 0, 2, 1, 0, 0)
"""Runs of four, two and one: of three, blocks of 1024 would make no difference."""
RULE_REPEATS = (1, 40, 400)
"""How often the ids of a step follow each other: blocks are 1024 elements long."""
ROW_COUNTS = (0, 3, 2**31 - 1)
"""How many rows are counted."""


def _rule_programs(_: Traits) -> st.SearchStrategy[Program]:
    """Tables of every layer, then passes by both rules, and further tables."""
    layers = st.integers(0, LAYERS - 1)
    first = st.tuples(*(_rule_tables(st.just(layer)) for layer in range(LAYERS)))
    steps = st.lists(
        st.one_of(_row_hash(layers), _block_turns(layers), _rule_tables(layers)), min_size=1
    )
    return st.builds(lambda first, steps: make_program([*first, *steps[:6]]), first, steps)


def _rule_tables(layer: st.SearchStrategy[int]) -> st.SearchStrategy[Step]:
    turn = st.integers(0, RULE_SLOTS - 1)
    return st.builds(lambda layer, turn: Step("table", (layer, turn)), layer, turn)


def _rule_table(turn: int) -> RoutingTable:
    """All shares on one replica, since the rules read none."""
    placement = [*RULE_PLACEMENT[turn:], *RULE_PLACEMENT[:turn]]
    return routing_tables.make_table(
        placement, [placement.index(expert) == slot for slot, expert in enumerate(placement)]
    )


def _row_hash(layer: st.SearchStrategy[int]) -> st.SearchStrategy[Step]:
    return st.builds(
        lambda layer, top_k, rows, repeat, ids: Step(
            "row_hash", (layer, top_k, rows, repeat, *ids)
        ),
        layer,
        st.integers(1, 4),
        st.sampled_from(ROW_COUNTS),
        st.sampled_from(RULE_REPEATS),
        _drawn_ids(),
    )


def _block_turns(layer: st.SearchStrategy[int]) -> st.SearchStrategy[Step]:
    return st.builds(
        lambda layer, offset, repeat, ids: Step("block_turns", (layer, offset, repeat, *ids)),
        layer,
        st.integers(0, 4),
        st.sampled_from(RULE_REPEATS),
        _drawn_ids(),
    )


def _drawn_ids() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(-1, EXPERTS), max_size=8)


@dataclass
class _RuleRunner:
    """Kernels on the device, and the same tables on the host, by layer."""

    ctx: RankContext
    stream: Stream
    tables: Tables
    host_tables: dict[int, RoutingTable] = field(default_factory=dict)

    def run_step(self, step: Step) -> None:
        """Run one kernel to its end, and compare."""
        calls: dict[str, Callable[..., None]] = {
            "table": self.install,
            "row_hash": self.row_hash,
            "block_turns": self.block_turns,
        }
        calls[step.op](*step.args)

    def install(self, layer: int, turn: int) -> None:
        self.host_tables[layer] = _rule_table(turn)
        update = routing_tables.make_update(layer, self.host_tables[layer])
        self.ctx.accelerator.kernels.commit_tables(update, self.tables, self.stream)
        self.ctx.drain(self.stream)

    def row_hash(self, layer: int, top_k: int, rows: int, repeat: int, *values: int) -> None:
        counted = torch.tensor([rows], dtype=torch.int32)
        rule = RowHash(top_k, self.ctx.copy_of(counted))
        self.judge(layer, rule, RowHash(top_k, counted), [*values] * repeat)

    def block_turns(self, layer: int, offset: int, repeat: int, *values: int) -> None:
        rule = BlockTurns(offset)
        self.judge(layer, rule, rule, [*values] * repeat)

    def judge(
        self, layer: int, rule: ReplicaRule, reference: ReplicaRule, values: list[int]
    ) -> None:
        """First the padding, then every bit; `reference` is the same rule on the host."""
        ids = torch.tensor(values, dtype=torch.int32)
        out = routing_tables.empty_output(self.ctx, ids.numel(), EXPERTS)
        self.ctx.accelerator.kernels.route_by_rule(
            rule, self.ctx.copy_of(ids), self.tables, layer, out.slots, out.counts, self.stream
        )
        self.ctx.drain(self.stream)
        slots, counts = route_by_rule(ids, self.host_tables[layer], reference)
        self.judge_padding(ids, out.slots)
        require_equal("G8", out.slots, slots, f"{reference}: slots")
        require_equal("G8", out.counts, counts, f"{reference}: counts")

    def judge_padding(self, ids: Tensor, slots: Tensor) -> None:
        strays = to_host(slots)[(ids < 0) | (ids >= EXPERTS)]
        require("G8", bool((strays == RULE_SLOTS).all()), f"padding goes to {strays.tolist()}")


def _play_rules(ctx: RankContext, program: Program) -> Play:
    live = routing_tables.zeroed_tables(ctx, LAYERS, EXPERTS, RULE_SLOTS, 1)
    runner = _RuleRunner(ctx, ctx.accelerator.stream(Role.COMPUTE), live)
    for step in program.steps:
        runner.run_step(step)
        yield NEXT


RULES = Property(
    name="kernels-keep-the-rules-of-other-engines",
    family="kernels",
    clauses=("G8",),
    claim="Routing by a published rule gives that rule's slots and counts bit for bit.",
    programs=_rule_programs,
    play=_play_rules,
)


PROPERTIES = (
    VALUES,
    *LARGE_MODELS,
    *OPERANDS,
    RULES,
    SALTED,
    COMMITTED,
    ONE_GENERATION,
    ONE_GENERATION_BY_RULE,
    TABLES_AND_WEIGHTS,
    GRAPHS,
    LONG_GRAPHS,
    REPLAY_STREAM,
    STREAM_ORDER,
)
