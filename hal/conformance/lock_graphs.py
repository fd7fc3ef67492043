"""Family *locks*: a lock whose verbs were captured once and are replayed often."""

from dataclasses import dataclass, field
from functools import partial

from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.accelerator import Graph
from equipoise.hal.conformance.bench import NEXT, Bench, Play, attempt, demand
from equipoise.hal.conformance.needs import a_graph, a_lock, all_of, several_streams
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.errors import StreamTimeout
from equipoise.hal.lock import StreamLock
from equipoise.hal.stream import Event, Role, Stream

MOST_TURNS = 4
NBYTES = 8


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    """Replays and turns of the mover, each of which may be ahead of the other."""
    steps = st.lists(st.sampled_from(("replay", "write")).map(Step), min_size=1, max_size=8)
    return steps.map(lambda drawn: program(_valid(drawn)))


def _valid(steps: list[Step]) -> list[Step]:
    """The mover writes again only when the replay that reads has been launched."""
    kept: list[Step] = []
    for step in steps:
        launched = kept.count(Step("replay"))
        most = MOST_TURNS if step.op == "replay" else min(MOST_TURNS, launched + 1)
        if kept.count(step) < most:
            kept.append(step)
    return kept


@dataclass
class _Desk:
    """A graph of acquire, read and release, and what its replays have read.

    Attributes:
        value: uint8 [NBYTES]; turn k writes k + 1 into every byte.
        read: uint8 [NBYTES], where the graph copies `value` to.
        rows: uint8 [MOST_TURNS, NBYTES], `read` after each replay.
        passed: events behind the replays.
    """

    bench: Bench
    lock: StreamLock
    graph: Graph
    value: Tensor
    read: Tensor
    rows: Tensor
    passed: list[Event] = field(default_factory=list)
    written: int = 0

    def stream(self) -> Stream:
        return self.bench.accelerator.stream(Role.COMPUTE)

    def capture(self) -> None:
        """Once, before everything."""

        def section() -> None:
            self.lock.acquire(self.stream())
            self.stream().launch(partial(self.read.copy_, self.value))
            self.lock.release(self.stream())

        self.graph.capture(self.stream(), section)

    def replay(self) -> None:
        self.graph.replay(self.stream())
        self.stream().launch(partial(self.rows[len(self.passed)].copy_, self.read))
        self.passed.append(self.bench.accelerator.event())
        self.stream().record(self.passed[-1])

    def write(self) -> Play:
        patience = self.bench.patience
        if self.written:
            turn = self.written - 1
            late = attempt(partial(self.lock.wait, 0, patience), StreamTimeout)
            demand(_blamed(turn), not late, f"replay {turn} never releases")
        copy = self.bench.accelerator.stream(Role.COPY)
        copy.launch(partial(self.value.fill_, self.written + 1))
        copy.synchronize(patience)
        yield NEXT
        self.lock.signal(0)
        self.written += 1

    def look(self) -> None:
        """No replay goes through without a signal of its own."""
        passed = sum(event.query() for event in self.passed)
        what = f"replay {passed - 1} went through after {self.written} signals"
        demand(_blamed(passed - 1), passed <= self.written, what)


def _blamed(turn: int) -> str:
    """What fails at the first replay was not captured; what fails later did not reset itself."""
    return "L2" if turn else "O6"


def _play(bench: Bench, found: Program) -> Play:
    opened = bench.accelerator
    value, read = bench.filled((NBYTES,), 0), bench.filled((NBYTES,), 0)
    rows = bench.filled((MOST_TURNS, NBYTES), 0)
    desk = _Desk(bench, opened.stream_lock(bench.patience), opened.graph(), value, read, rows)
    desk.capture()
    for step in found.steps:
        if step.op == "replay":
            desk.replay()
        else:
            yield from desk.write()
        yield NEXT
        desk.look()
    yield from _end(bench, desk)


def _end(bench: Bench, desk: _Desk) -> Play:
    """Give the signals that are still missing, then compare what was read."""
    while desk.written < len(desk.passed):
        yield from desk.write()
    late = attempt(partial(desk.stream().synchronize, bench.patience), StreamTimeout)
    demand("O6", not late, "every replay has its signal, and the stream still waits")
    for turn, row in enumerate(desk.rows[: len(desk.passed)].tolist()):
        what = f"replay {turn} reads {row}, not {turn + 1} throughout"
        demand(_blamed(turn), row == [turn + 1] * NBYTES, what)


CAPTURED = Property(
    name="a-captured-lock-hands-over-at-every-replay",
    family="locks",
    clauses=("O6", "L2"),
    claim="Captured once, every replay waits for a signal of its own and reads what it announced.",
    programs=_programs,
    play=_play,
    needs=all_of(a_lock, a_graph, several_streams),
)
