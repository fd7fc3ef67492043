"""Family *kernels*: kernels are launches like any others, also in a graph."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.accelerator import Graph
from equipoise.hal.checksum import as_int64, checksum
from equipoise.hal.conformance import routes
from equipoise.hal.conformance.bench import NEXT, Bench, Play, attempt, demand
from equipoise.hal.conformance.needs import a_graph, a_held_stream
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.errors import StreamTimeout
from equipoise.hal.kernels import Salt, Tables
from equipoise.hal.routing import SHARE_ONE
from equipoise.hal.routing_rules import BlockTurns, RowHash, Rule
from equipoise.hal.stream import Role, Stream

KERNELS = ("count", "hashed", "apportioned", "row_hash", "block_turns", "solve", "checksum")
EXPERTS = 4
"""Also slots and tokens: every expert has one slot, of its own number."""
MOST_STEPS = 8


def _programs(traits: Traits) -> st.SearchStrategy[Program]:
    """New ids, kernels and replays of kernels on one stream, which may be held from the start."""
    kernel = st.sampled_from(KERNELS)
    steps = [
        st.integers(0, EXPERTS - 1).map(lambda expert: Step("feed", (expert,))),
        kernel.map(lambda name: Step("kernel", (name,))),
    ]
    if a_graph(traits) is None:
        steps.append(kernel.map(lambda name: Step("replay", (name,))))
    holds = [[]] if a_held_stream(traits) else [[], [Step("hold")]]
    drawn = st.lists(st.one_of(steps), min_size=1, max_size=MOST_STEPS)
    return st.builds(lambda hold, rest: program([*hold, *rest]), st.sampled_from(holds), drawn)


@dataclass
class _Desk:
    """Kernels on persistent tensors.

    Attributes:
        live: tables of one layer.
        ids: int32 [EXPERTS], all of one expert.
        load: int64 [EXPERTS], for the shares.
        slots: int32 [EXPERTS], counts and shares likewise; total is int64 [1]: results.
        rules: of other engines.
        rows: a copy of the result of each kernel, int64.
    """

    bench: Bench
    stream: Stream
    live: Tables
    ids: Tensor
    load: Tensor
    slots: Tensor
    counts: Tensor
    shares: Tensor
    total: Tensor
    rules: dict[str, Rule]
    graphs: dict[str, Graph] = field(default_factory=dict)
    rows: list[Tensor] = field(default_factory=list)
    let_go: Callable[[], None] = lambda: None

    def do(self, op: str, *args: int | str) -> None:
        calls: dict[str, Callable[..., None]] = {
            "feed": self.feed,
            "kernel": self.kernel,
            "replay": self.replay,
            "hold": self.hold,
        }
        calls[op](*args)

    def hold(self) -> None:
        self.let_go = self.bench.hold(self.stream)

    def feed(self, expert: int) -> None:
        self.bench.disturb(self.stream)
        self.stream.launch(partial(self.ids.fill_, expert))

    def kernel(self, name: str) -> None:
        self.launch(name)
        self.keep(name)

    def replay(self, name: str) -> None:
        if name not in self.graphs:
            self.graphs[name] = self.bench.accelerator.graph()
            self.graphs[name].capture(self.stream, partial(self.launch, name))
        self.graphs[name].replay(self.stream)
        self.keep(name)

    def launch(self, name: str) -> None:
        kernels, salt, live = self.bench.accelerator.kernels, Salt(0, 0, 0), self.live
        ids, slots, counts = self.ids, self.slots, self.counts
        if name == "count":
            kernels.count(ids, counts, self.stream)
        elif name == "hashed":
            kernels.route_and_count(ids, live, salt, slots, counts, self.stream)
        elif name == "apportioned":
            given = live.cumulative[1, 0]
            kernels.route_apportioned(ids, live, given, salt, slots, counts, self.stream)
        elif name in ("row_hash", "block_turns"):
            kernels.route_by_rule(self.rules[name], ids, live, 0, slots, counts, self.stream)
        elif name == "solve":
            kernels.solve_shares(self.load, live, 0, self.shares, self.stream)
        else:
            kernels.checksum(ids, self.total, self.stream)

    def keep(self, name: str) -> None:
        """Copy what the kernel has left, behind it on the stream."""
        results = {"count": self.counts, "solve": self.shares, "checksum": self.total}
        result = results.get(name, self.slots)
        row = self.bench.empty(result.shape, result.dtype)
        self.stream.launch(partial(row.copy_, result))
        self.rows.append(row)


def _desk(bench: Bench) -> _Desk:
    """With tables in which every expert has one slot, and ids of expert 0."""
    stream, of = bench.accelerator.stream(Role.COMPUTE), partial(bench.filled, (EXPERTS,))
    live = routes.tables(bench, 1, EXPERTS, EXPERTS, 1)
    made = routes.update(0, routes.table(range(EXPERTS), [1] * EXPERTS))
    # Where a kernel is compiled and loaded with its first launch, that waits for a held stream.
    bench.accelerator.kernels.warm(live, stream)
    bench.accelerator.kernels.commit_tables(made, live, stream)
    bench.drain(stream)
    return _Desk(
        bench,
        stream,
        live,
        ids=of(0, torch.int32),
        load=of(1, torch.int64),
        slots=of(-1, torch.int32),
        counts=of(-1, torch.int32),
        shares=of(-1, torch.int32),
        total=bench.filled((1,), -1, torch.int64),
        rules={
            "row_hash": RowHash(1, of(EXPERTS, torch.int32)[:1]),
            "block_turns": BlockTurns(0),
        },
    )


def _due(name: str, expert: int) -> list[int]:
    """What the kernel leaves when all ids are of `expert`."""
    if name == "count":
        return [EXPERTS * (number == expert) for number in range(EXPERTS)]
    if name == "solve":
        return [SHARE_ONE] * EXPERTS
    if name == "checksum":
        return [as_int64(checksum(torch.full((EXPERTS,), expert, dtype=torch.int32)))]
    return [expert] * EXPERTS


def _play(bench: Bench, found: Program) -> Play:
    desk, expert, due = _desk(bench), 0, []
    for step in found.steps:
        stuck = attempt(partial(desk.do, step.op, *step.args), StreamTimeout)
        demand("G3", not stuck, f"{step} waits for a stream that is held: {stuck}")
        if step.op == "feed":
            expert = int(step.args[0])
        elif step.op != "hold":
            due.append((step, _due(str(step.args[0]), expert)))
        yield NEXT
    desk.let_go()
    bench.drain()
    for (step, wanted), row in zip(due, desk.rows, strict=True):
        demand("G3", row.tolist() == wanted, f"{step} leaves {row.tolist()}, not {wanted}")


FOLLOWING = Property(
    name="kernels-follow-their-stream",
    family="kernels",
    clauses=("G3",),
    claim="A kernel reads its tensors when the stream comes to it, replayed or not, and the host "
    "never waits.",
    programs=_programs,
    play=_play,
)
