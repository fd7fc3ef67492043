"""Family *kernels*: operands that must be refused, and when a kernel reads its operands."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance.context import (
    NEXT,
    Play,
    RankContext,
    catch,
    require,
    require_equal,
    to_host,
)
from equipoise.hal.conformance.fixtures import routing_tables
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.properties.kernels_large import update_of_layers
from equipoise.hal.conformance.property import Property, Traits, holdable_stream
from equipoise.hal.errors import KernelError
from equipoise.hal.kernels import Kernels, Salt, Tables
from equipoise.hal.levelled_routing import GroupCounts
from equipoise.hal.routing_rules import BlockTurns, RowHash
from equipoise.hal.stream import Role, Stream

FAMILY = "kernels"
LAYERS, EXPERTS, TOKENS = 2, 3, 4
PLACEMENT = (0, 1, 2, 0)
SLOTS = len(PLACEMENT)
UNTOUCHED_VALUE = -7
"""What outputs hold before, and must hold after a call that was refused."""


@dataclass
class _OperandRunner:
    """Tables of two layers, and operands, of which each call gets one that does not fit."""

    ctx: RankContext
    tables: Tables
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def kernels(self) -> Kernels:
        return self.ctx.accelerator.kernels

    @property
    def stream(self) -> Stream:
        return self.ctx.accelerator.stream(Role.COMPUTE)

    def ids(self, count: int = TOKENS, dtype: torch.dtype = torch.int32) -> Tensor:
        return self.ctx.full((count,), 1, dtype)

    def output(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """An output that a call which is refused leaves alone."""
        self.outputs.append(self.ctx.full((count,), UNTOUCHED_VALUE, dtype))
        return self.outputs[-1]

    def route(
        self,
        ids: Tensor | None = None,
        slots: Tensor | None = None,
        counts: Tensor | None = None,
        layer: int = 0,
    ) -> None:
        """A hashed pass."""
        self.kernels.route_and_count(
            self.ids() if ids is None else ids,
            self.tables,
            Salt(0, layer, 0),
            self.output(TOKENS) if slots is None else slots,
            self.output(EXPERTS) if counts is None else counts,
            self.stream,
        )

    def apportion(self, cumulative: Tensor, layer: int = 0, ids: Tensor | None = None) -> None:
        operand = self.ids() if ids is None else ids
        slots, counts = self.output(TOKENS), self.output(EXPERTS)
        self.kernels.route_apportioned(
            operand, self.tables, cumulative, Salt(0, layer, 0), slots, counts, self.stream
        )

    def level(
        self, ids: Tensor | None = None, layer: int = 0, group: GroupCounts | None = None
    ) -> None:
        operand = self.ids() if ids is None else ids
        slots, counts = self.output(TOKENS), self.output(EXPERTS)
        self.kernels.route_levelled(
            operand, self.tables, Salt(0, layer, 0), group, slots, counts, self.stream
        )

    def by_rule(self, ids: Tensor, layer: int = 0, rows: Tensor | None = None) -> None:
        rule = BlockTurns(0) if rows is None else RowHash(1, rows)
        slots, counts = self.output(TOKENS), self.output(EXPERTS)
        self.kernels.route_by_rule(rule, ids, self.tables, layer, slots, counts, self.stream)

    def solve(
        self, counts: Tensor | None = None, out: Tensor | None = None, layer: int = 0
    ) -> None:
        load = self.ctx.full((EXPERTS,), 1, torch.int64) if counts is None else counts
        shares = self.output(SLOTS) if out is None else out
        self.kernels.solve_shares(load, self.tables, layer, shares, self.stream)

    def commit(self, layers: tuple[int, ...], **parts: Tensor) -> None:
        table = routing_tables.make_table(PLACEMENT, [1] * SLOTS)
        update = replace(
            update_of_layers(range(len(layers)), [table] * len(layers)), layers=layers, **parts
        )
        self.kernels.commit_tables(update, self.tables, self.stream)

    def strided(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """A column: every second element."""
        return self.ctx.full((2 * count,), 1, dtype)[::2]

    def strided_output(self, count: int) -> Tensor:
        return self.output(2 * count)[::2]


WIDE_DTYPE = torch.int64
BAD_ROUTES: Mapping[str, Callable[[_OperandRunner], object]] = {
    "ids_of_strides": lambda d: d.route(ids=d.strided(TOKENS)),
    "wide_ids": lambda d: d.route(ids=d.ids(dtype=WIDE_DTYPE)),
    "ids_of_rows": lambda d: d.route(ids=d.ids().view(2, 2)),
    "slots_of_strides": lambda d: d.route(slots=d.strided_output(TOKENS)),
    "wide_slots": lambda d: d.route(slots=d.output(TOKENS, WIDE_DTYPE)),
    "too_few_slots": lambda d: d.route(slots=d.output(TOKENS - 1)),
    "too_many_slots": lambda d: d.route(slots=d.output(TOKENS + 1)),
    "wide_counts": lambda d: d.route(counts=d.output(EXPERTS, WIDE_DTYPE)),
    "too_few_counts": lambda d: d.route(counts=d.output(EXPERTS - 1)),
    "too_many_counts": lambda d: d.route(counts=d.output(EXPERTS + 1)),
    "layer_behind_the_last": lambda d: d.route(layer=LAYERS),
    "layer_below_the_first": lambda d: d.route(layer=-1),
    "shares_of_strides": lambda d: d.apportion(d.strided(SLOTS)),
    "too_few_shares": lambda d: d.apportion(d.ids(SLOTS - 1)),
    "apportioned_ids_of_strides": lambda d: d.apportion(d.ids(SLOTS), ids=d.strided(TOKENS)),
    "apportioned_layer_behind_the_last": lambda d: d.apportion(d.ids(SLOTS), layer=LAYERS),
    "levelled_ids_of_strides": lambda d: d.level(ids=d.strided(TOKENS)),
    "levelled_layer_behind_the_last": lambda d: d.level(layer=LAYERS),
    "wide_total": lambda d: d.level(group=GroupCounts(d.ids(EXPERTS, WIDE_DTYPE), d.ids(EXPERTS))),
    "too_few_before": lambda d: d.level(group=GroupCounts(d.ids(EXPERTS), d.ids(EXPERTS - 1))),
    "ruled_ids_of_strides": lambda d: d.by_rule(d.strided(TOKENS)),
    "ruled_layer_behind_the_last": lambda d: d.by_rule(d.ids(), layer=LAYERS),
    "wide_rows": lambda d: d.by_rule(d.ids(), rows=d.ids(1, WIDE_DTYPE)),
}
BAD_COUNTS: Mapping[str, Callable[[_OperandRunner], object]] = {
    "counted_ids_of_strides": lambda d: d.kernels.count(
        d.strided(TOKENS), d.output(EXPERTS), d.stream
    ),
    "counted_wide_ids": lambda d: d.kernels.count(
        d.ids(dtype=WIDE_DTYPE), d.output(EXPERTS), d.stream
    ),
    "count_into_strides": lambda d: d.kernels.count(d.ids(), d.strided_output(EXPERTS), d.stream),
    "narrow_load": lambda d: d.solve(counts=d.ids(EXPERTS)),
    "load_of_strides": lambda d: d.solve(counts=d.strided(EXPERTS, WIDE_DTYPE)),
    "too_short_load": lambda d: d.solve(counts=d.ids(EXPERTS - 1, WIDE_DTYPE)),
    "solve_into_too_little": lambda d: d.solve(out=d.output(SLOTS - 1)),
    "solve_into_strides": lambda d: d.solve(out=d.strided_output(SLOTS)),
    "solved_layer_behind_the_last": lambda d: d.solve(layer=LAYERS),
    "sum_into_narrow": lambda d: d.kernels.checksum(d.ids(), d.output(1), d.stream),
    "sum_into_too_much": lambda d: d.kernels.checksum(d.ids(), d.output(2, WIDE_DTYPE), d.stream),
    "sum_of_strides": lambda d: d.kernels.checksum(
        d.strided(TOKENS), d.output(1, WIDE_DTYPE), d.stream
    ),
}
BAD_COMMITS: Mapping[str, Callable[[_OperandRunner], object]] = {
    "commit_of_a_layer_twice": lambda d: d.commit((0, 0)),
    "commit_behind_the_last_layer": lambda d: d.commit((0, LAYERS)),
    "commit_below_the_first_layer": lambda d: d.commit((0, -1)),
    "commit_of_too_few_rows": lambda d: d.commit(
        (0, 1), start=torch.zeros((1, EXPERTS + 1), dtype=torch.int32)
    ),
    "commit_of_other_slots": lambda d: d.commit(
        (0,), replicas=torch.zeros((1, SLOTS + 1), dtype=torch.int32)
    ),
    "commit_of_wide_shares": lambda d: d.commit(
        (0,), cumulative=torch.zeros((1, SLOTS), dtype=WIDE_DTYPE)
    ),
}
BAD_CALLS = {**BAD_ROUTES, **BAD_COUNTS, **BAD_COMMITS}
"""One operand each that does not fit."""
CALLS_PER_PROGRAM = 8
"""Calls of a program: few programs are played, and each call is to be in some of them."""


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    calls = st.lists(
        st.sampled_from(sorted(BAD_CALLS)),
        min_size=CALLS_PER_PROGRAM,
        max_size=CALLS_PER_PROGRAM,
        unique=True,
    )
    return calls.map(lambda names: make_program(map(Step, names)))


def _operand_runner(ctx: RankContext) -> _OperandRunner:
    return _OperandRunner(ctx, routing_tables.zeroed_tables(ctx, LAYERS, EXPERTS, SLOTS, 1))


def _play(ctx: RankContext, program: Program) -> Play:
    runner = _operand_runner(ctx)
    runner.commit((0, 1))
    ctx.drain(runner.stream)
    before = _table_contents(runner.tables)
    for step in program.steps:
        refusal = catch(partial(BAD_CALLS[step.op], runner), Exception)
        description = f"{type(refusal).__name__}: {refusal}" if refusal else "nothing"
        require(
            "G11",
            isinstance(refusal, KernelError),
            f"{step} raised {description}, not a KernelError",
        )
        yield NEXT
    ctx.drain(runner.stream)
    touched = [
        k for k, out in enumerate(runner.outputs) if bool((to_host(out) != UNTOUCHED_VALUE).any())
    ]
    require("G11", not touched, "a refused call wrote to its output")
    for name, part in _table_contents(runner.tables).items():
        require_equal("G11", part, before[name], f"{name} of the tables after refused calls")


def _table_contents(live: Tables) -> dict[str, Tensor]:
    names = ("generation", "start", "replicas", "cumulative")
    return {name: to_host(getattr(live, name)).clone() for name in names}


def _overwritten_update_programs(_: Traits) -> st.SearchStrategy[Program]:
    """Which part of an update its owner scribbles on before the stream comes to the commit."""
    parts = st.sampled_from(("start", "replicas", "cumulative"))
    return parts.map(lambda name: make_program([Step("scribble", (name,))]))


def _play_overwritten_update(ctx: RankContext, program: Program) -> Play:
    runner = _operand_runner(ctx)
    table = routing_tables.make_table(PLACEMENT, [1] * SLOTS)
    update = update_of_layers([1], [table])
    # Where a kernel is compiled and loaded with its first launch, that waits for a held stream.
    runner.kernels.warm(runner.tables, runner.stream)
    ctx.drain(runner.stream)
    release = ctx.hold(runner.stream)
    runner.kernels.commit_tables(update, runner.tables, runner.stream)
    yield NEXT
    getattr(update, str(program.steps[0].args[0])).fill_(UNTOUCHED_VALUE)
    release()
    ctx.drain(runner.stream)
    for name in ("start", "replicas", "cumulative"):
        contents = to_host(getattr(runner.tables, name))[1, 1]
        require_equal(
            "G10", contents, getattr(table, name), f"{name}, of an update that was changed later"
        )


def _unsolved_layer_programs(_: Traits) -> st.SearchStrategy[Program]:
    return st.integers(0, LAYERS - 1).map(lambda layer: make_program([Step("solve", (layer,))]))


def _play_unsolved_layer(ctx: RankContext, program: Program) -> Play:
    """Before the first commit, and then on the one layer that has no tables still."""
    runner, layer = _operand_runner(ctx), int(program.steps[0].args[0])
    for committed in (False, True):
        if committed:
            runner.commit((1 - layer,))
        out = runner.output(SLOTS)
        failed = catch(partial(runner.solve, out=out, layer=layer))
        require("G12", not failed, f"solving a layer without tables raised {failed!r}")
        yield NEXT
        stuck = catch(partial(ctx.drain, runner.stream), Exception)
        require("G12", not stuck, f"solving a layer without tables failed its stream: {stuck!r}")
        shares = to_host(out).tolist()
        require(
            "G12",
            shares == [UNTOUCHED_VALUE] * SLOTS,
            f"shares of a layer without tables are {shares}",
        )


OPERANDS = (
    Property(
        name="an-operand-that-does-not-fit-changes-nothing",
        family=FAMILY,
        clauses=("G11",),
        claim="A kernel with one bad operand raises KernelError, and nothing else happens.",
        programs=_programs,
        play=_play,
    ),
    Property(
        name="an-update-of-tables-is-taken-at-the-call",
        family=FAMILY,
        clauses=("G10",),
        claim="What becomes of an update behind the call is nothing to its commit.",
        programs=_overwritten_update_programs,
        play=_play_overwritten_update,
        needs=holdable_stream,
    ),
    Property(
        name="solve-shares-ignores-layers-without-tables",
        family=FAMILY,
        clauses=("G12",),
        claim="Solving ahead of the first commit writes nothing, and fails no stream.",
        programs=_unsolved_layer_programs,
        play=_play_unsolved_layer,
    ),
)
