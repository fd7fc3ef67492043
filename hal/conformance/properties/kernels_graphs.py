"""Family *kernels*: kernels and launches in stream order, also in a captured graph."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.accelerator import Graph
from equipoise.hal.checksum import as_int64, checksum
from equipoise.hal.conformance.context import NEXT, Play, RankContext, catch, require, to_host
from equipoise.hal.conformance.fixtures import routing_tables
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.property import (
    Property,
    Traits,
    all_of,
    concurrent_streams,
    graph_support,
    holdable_stream,
    kernel_capture,
)
from equipoise.hal.errors import StreamTimeout
from equipoise.hal.kernels import Salt, Tables
from equipoise.hal.routing import SHARE_ONE
from equipoise.hal.routing_rules import BlockTurns, ReplicaRule, RowHash
from equipoise.hal.stream import Role, Stream

BASE = 4
"""Every launch appends a digit of this base to one number, which shows the launch order."""
MAX_CAPTURED = 3
MAX_GRAPH_STEPS = 6
ROLES = tuple(role.value for role in Role)[:2]


def _graph_programs(_: Traits) -> st.SearchStrategy[Program]:
    """Launches to be captured, then replays and launches of the ordinary kind; the graph may be
    dropped before they have run."""
    digit = st.integers(1, BASE - 1)
    captured = digit.map(lambda digit: Step("captured launch", (digit,)))
    launch = digit.map(lambda digit: Step("launch", (digit,)))
    inside = st.lists(captured, min_size=1, max_size=MAX_CAPTURED)
    after = st.lists(st.one_of(st.just(Step("replay")), launch), max_size=MAX_GRAPH_STEPS)
    drop = st.sampled_from(([], [DROP]))
    return st.builds(
        lambda *parts: make_program(step for part in parts for step in part), inside, after, drop
    )


DROP = Step("drop")
"""Last step of a program whose graph is dropped behind its replays."""


def _append(number: Tensor, digit: int) -> None:
    number.mul_(BASE).add_(digit)


def _launch(stream: Stream, number: Tensor, steps: tuple[Step, ...]) -> None:
    for step in steps:
        stream.launch(partial(_append, number, int(step.args[0])))


def _play_graph(ctx: RankContext, program: Program) -> Play:
    stream = ctx.accelerator.stream(Role.COMPUTE)
    number = ctx.full((1,), 0, torch.int64)
    inside = tuple(step for step in program.steps if step.op == "captured launch")
    graph = ctx.accelerator.graph()
    graph.capture(stream, partial(_launch, stream, number, inside))
    yield NEXT
    ctx.drain(stream)
    require("B7", int(number) == 0, "what was captured ran before any replay")
    expected: list[Step] = []
    dropped = DROP in program.steps
    for step in program.steps[len(inside) : len(program.steps) - dropped]:
        ctx.inject_delay(stream)
        if step.op == "replay":
            graph.replay(stream)
        else:
            _launch(stream, number, (step,))
        expected.extend(inside if step.op == "replay" else (step,))
        yield NEXT
    if dropped:
        del graph
    ctx.drain(stream)
    expected_digits = [int(step.args[0]) for step in expected]
    digits = _digits(int(number))
    require("B7", digits == expected_digits, f"ran {digits}, not {expected_digits}")


MANY_CAPTURED = 300
"""Launches of a graph: a forward pass has hundreds."""


def _long_graph_programs(_: Traits) -> st.SearchStrategy[Program]:
    return st.sampled_from(ROLES).map(lambda role: make_program([Step("long", (role,))]))


def _play_long_graph(ctx: RankContext, program: Program) -> Play:
    """Each launch raises the byte of its own number; two replays raise each twice."""
    stream = ctx.accelerator.stream(Role(str(program.steps[0].args[0])))
    counts, graph = ctx.full((MANY_CAPTURED,), 0), ctx.accelerator.graph()

    def launch_all() -> None:
        for number in range(MANY_CAPTURED):
            stream.launch(partial(counts[number : number + 1].add_, 1))

    graph.capture(stream, launch_all)
    for _ in range(2):
        graph.replay(stream)
        yield NEXT
    ctx.drain(stream)
    wrong = (to_host(counts) != 2).nonzero().flatten().tolist()
    what = f"of {MANY_CAPTURED} captured launches {len(wrong)} did not run twice: {wrong[:5]}"
    require("B7", not wrong, what)


def _other_stream_programs(_: Traits) -> st.SearchStrategy[Program]:
    """`capture(role)`, then launches and replays on another stream, while the first is held."""
    roles = st.permutations(ROLES).map(lambda roles: roles[:2])
    after = st.lists(st.sampled_from((Step("replay"), Step("launch", (2,)))), max_size=4)
    return st.builds(
        lambda pair, steps: make_program(
            [Step("capture", (pair[0],)), *steps, Step("replay")], settings={"on": pair[1]}
        ),
        roles,
        after,
    )


def _play_other_stream(ctx: RankContext, program: Program) -> Play:
    """First the stream that was captured is held, then the one that replays are launched on."""
    captured, *steps = program.steps
    first, second = (
        ctx.accelerator.stream(Role(str(name)))
        for name in (captured.args[0], program.setting("on"))
    )
    number, graph = ctx.full((1,), 0, torch.int64), ctx.accelerator.graph()
    inside = (Step("launch", (1,)), Step("launch", (3,)))
    graph.capture(first, partial(_launch, first, number, inside))
    ctx.drain(first)
    release = ctx.hold(first)
    expected: list[int] = []
    for step in steps:
        if step.op == "replay":
            graph.replay(second)
        else:
            _launch(second, number, (step,))
        expected += [1, 3] if step.op == "replay" else [2]
        yield NEXT
    stuck = catch(partial(ctx.drain, second), StreamTimeout)
    require("B7", not stuck, f"a replay on {second.role} waits for {first.role}, which is held")
    digits = _digits(int(to_host(number)))
    require("B7", digits == expected, f"on {second.role} ran {digits}, not {expected}")
    release()
    release = ctx.hold(second)
    graph.replay(second)
    ctx.drain(first)
    digits = _digits(int(to_host(number)))
    require("B7", digits == expected, f"{digits} ran, though {second.role} is held: not {expected}")
    release()
    ctx.drain()
    digits = _digits(int(to_host(number)))
    require("B7", digits == [*expected, 1, 3], f"in the end ran {digits}, not {[*expected, 1, 3]}")


def _digits(number: int) -> list[int]:
    """Most significant first."""
    return [*_digits(number // BASE), number % BASE] if number else []


GRAPHS = Property(
    name="a-graph-runs-at-its-replays-only",
    family="kernels",
    clauses=("B7",),
    claim="Capturing runs nothing; each replay runs all of it, in the order of the stream, also of "
    "a graph that is dropped.",
    programs=_graph_programs,
    play=_play_graph,
    needs=graph_support,
)
LONG_GRAPHS = Property(
    name="a-graph-holds-hundreds-of-launches",
    family="kernels",
    clauses=("B7",),
    claim="Each replay runs every launch that was captured, however many there are.",
    programs=_long_graph_programs,
    play=_play_long_graph,
    needs=graph_support,
    large=True,
)
REPLAY_STREAM = Property(
    name="a-graph-replays-on-the-stream-it-is-given",
    family="kernels",
    clauses=("B7",),
    claim="A replay comes after what its stream was given, and waits for no other stream.",
    programs=_other_stream_programs,
    play=_play_other_stream,
    needs=all_of(graph_support, holdable_stream, concurrent_streams),
)


KERNEL_NAMES = (
    "count",
    "hashed",
    "apportioned",
    "levelled",
    "row_hash",
    "block_turns",
    "solve",
    "checksum",
)
EXPERTS = 4
"""Also slots and tokens: every expert has one slot, of its own number."""
MAX_KERNEL_STEPS = 8


def _kernel_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """New ids, kernels and replays of kernels on one stream, which may be held from the start."""
    kernel = st.sampled_from(KERNEL_NAMES)
    steps = [
        st.integers(0, EXPERTS - 1).map(lambda expert: Step("feed", (expert,))),
        kernel.map(lambda name: Step("kernel", (name,))),
    ]
    if kernel_capture(traits) is None:
        steps.append(kernel.map(lambda name: Step("replay", (name,))))
    holds = [[]] if holdable_stream(traits) else [[], [Step("hold")]]
    step_lists = st.lists(st.one_of(steps), min_size=1, max_size=MAX_KERNEL_STEPS)
    return st.builds(
        lambda hold, following: make_program([*hold, *following]),
        st.sampled_from(holds),
        step_lists,
    )


@dataclass
class _KernelRunner:
    """Kernels on persistent tensors.

    Attributes:
        tables: tables of one layer.
        ids: int32 [EXPERTS], all of one expert.
        load: int64 [EXPERTS], for the shares.
        slots: int32 [EXPERTS], counts and shares likewise; total is int64 [1]: results.
        rules: of other engines.
        rows: a copy of the result of each kernel, int64.
    """

    ctx: RankContext
    stream: Stream
    tables: Tables
    ids: Tensor
    load: Tensor
    slots: Tensor
    counts: Tensor
    shares: Tensor
    total: Tensor
    rules: dict[str, ReplicaRule]
    graphs: dict[str, Graph] = field(default_factory=dict)
    rows: list[Tensor] = field(default_factory=list)
    release: Callable[[], None] = lambda: None

    def run_step(self, op: str, *args: int | str) -> None:
        calls: dict[str, Callable[..., None]] = {
            "feed": self.feed,
            "kernel": self.kernel,
            "replay": self.replay,
            "hold": self.hold,
        }
        calls[op](*args)

    def hold(self) -> None:
        self.release = self.ctx.hold(self.stream)

    def feed(self, expert: int) -> None:
        self.ctx.inject_delay(self.stream)
        self.stream.launch(partial(self.ids.fill_, expert))

    def kernel(self, name: str) -> None:
        self.launch(name)
        self.copy_result(name)

    def replay(self, name: str) -> None:
        if name not in self.graphs:
            self.graphs[name] = self.ctx.accelerator.graph()
            self.graphs[name].capture(self.stream, partial(self.launch, name))
        self.graphs[name].replay(self.stream)
        self.copy_result(name)

    def launch(self, name: str) -> None:
        kernels, salt, live = self.ctx.accelerator.kernels, Salt(0, 0, 0), self.tables
        ids, slots, counts = self.ids, self.slots, self.counts
        if name == "count":
            kernels.count(ids, counts, self.stream)
        elif name == "hashed":
            kernels.route_and_count(ids, live, salt, slots, counts, self.stream)
        elif name == "apportioned":
            operand = live.cumulative[1, 0]
            kernels.route_apportioned(ids, live, operand, salt, slots, counts, self.stream)
        elif name == "levelled":
            kernels.route_levelled(ids, live, salt, None, slots, counts, self.stream)
        elif name in ("row_hash", "block_turns"):
            kernels.route_by_rule(self.rules[name], ids, live, 0, slots, counts, self.stream)
        elif name == "solve":
            kernels.solve_shares(self.load, live, 0, self.shares, self.stream)
        else:
            kernels.checksum(ids, self.total, self.stream)

    def copy_result(self, name: str) -> None:
        """Copy the kernel's result, after it on the stream."""
        results = {"count": self.counts, "solve": self.shares, "checksum": self.total}
        result = results.get(name, self.slots)
        row = self.ctx.empty(result.shape, result.dtype)
        self.stream.launch(partial(row.copy_, result))
        self.rows.append(row)


def _kernel_runner(ctx: RankContext) -> _KernelRunner:
    """With tables in which every expert has one slot, and ids of expert 0."""
    stream, of = ctx.accelerator.stream(Role.COMPUTE), partial(ctx.full, (EXPERTS,))
    live = routing_tables.zeroed_tables(ctx, 1, EXPERTS, EXPERTS, 1)
    update = routing_tables.make_update(0, routing_tables.make_table(range(EXPERTS), [1] * EXPERTS))
    # Where a kernel is compiled and loaded with its first launch, that waits for a held stream.
    ctx.accelerator.kernels.warm(live, stream)
    ctx.accelerator.kernels.commit_tables(update, live, stream)
    ctx.drain(stream)
    return _KernelRunner(
        ctx,
        stream,
        live,
        ids=of(0, torch.int32),
        load=of(1, torch.int64),
        slots=of(-1, torch.int32),
        counts=of(-1, torch.int32),
        shares=of(-1, torch.int32),
        total=ctx.full((1,), -1, torch.int64),
        rules={
            "row_hash": RowHash(1, of(EXPERTS, torch.int32)[:1]),
            "block_turns": BlockTurns(0),
        },
    )


def _expected_output(name: str, expert: int) -> list[int]:
    """What the kernel leaves when all ids are of `expert`."""
    if name == "count":
        return [EXPERTS * (number == expert) for number in range(EXPERTS)]
    if name == "solve":
        return [SHARE_ONE] * EXPERTS
    if name == "checksum":
        return [as_int64(checksum(torch.full((EXPERTS,), expert, dtype=torch.int32)))]
    return [expert] * EXPERTS


def _play_kernels(ctx: RankContext, program: Program) -> Play:
    runner, expert, expected = _kernel_runner(ctx), 0, []
    for step in program.steps:
        stuck = catch(partial(runner.run_step, step.op, *step.args), StreamTimeout)
        require("G3", not stuck, f"{step} waits for a stream that is held: {stuck}")
        if step.op == "feed":
            expert = int(step.args[0])
        elif step.op != "hold":
            expected.append((step, _expected_output(str(step.args[0]), expert)))
        yield NEXT
    runner.release()
    ctx.drain()
    for (step, expected_row), row in zip(expected, runner.rows, strict=True):
        require(
            "G3", row.tolist() == expected_row, f"{step} leaves {row.tolist()}, not {expected_row}"
        )


STREAM_ORDER = Property(
    name="kernels-follow-their-stream",
    family="kernels",
    clauses=("G3",),
    claim="A kernel reads its tensors when the stream comes to it, replayed or not, and the host "
    "never waits.",
    programs=_kernel_programs,
    play=_play_kernels,
)
