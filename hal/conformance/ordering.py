"""Family *ordering*: who runs after whom."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance.bench import NEXT, Bench, Play, attempt, demand
from equipoise.hal.conformance.model import Order
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.errors import EventNotRecorded
from equipoise.hal.stream import Event, Role, Stream

FAMILY = "ordering"
EVENTS = 3
MOST_LAUNCHES = 8
ROLES = tuple(role.value for role in Role)[:3]


def _steps(ops: tuple[str, ...]) -> st.SearchStrategy[Step]:
    """Any call, valid or not yet: those that cannot be made are left out of the program."""
    stream, event = st.sampled_from(ROLES), st.integers(0, EVENTS - 1)
    kinds = {
        "launch": st.builds(lambda s: Step("launch", (s,)), stream),
        "record": st.builds(lambda e, s: Step("record", (e, s)), event, stream),
        "wait": st.builds(lambda s, e: Step("wait", (s, e)), stream, event),
    }
    return st.one_of([kinds[op] for op in ops])


def _valid(steps: list[Step]) -> list[Step]:
    """Without waits on what was never recorded, and with a bounded number of launches."""
    order, kept = Order(), []
    for step in steps:
        if step.op == "wait" and not order.recorded(int(step.args[1])):
            continue
        if step.op == "launch" and len(order.launches) == MOST_LAUNCHES:
            continue
        _follow(order, step)
        kept.append(step)
    return kept


def _follow(order: Order, step: Step) -> None:
    """What the step means to the oracle."""
    if step.op == "launch":
        order.launch(str(step.args[0]))
    elif step.op == "record":
        order.record(int(step.args[0]), str(step.args[1]))
    else:
        order.wait(str(step.args[0]), int(step.args[1]))


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    drawn = st.lists(_steps(("launch", "record", "wait")), min_size=2, max_size=16)
    return drawn.map(lambda steps: program(_valid(steps)))


@dataclass
class _Desk:
    """The calls of a program on real streams and events.

    Every launch first copies the flags of all launches to a row of its own, then raises its own
    flag; so each row says which launches had run before.
    """

    bench: Bench
    flags: Tensor
    rows: Tensor
    events: dict[int, Event] = field(default_factory=dict)
    launched: int = 0

    def do(self, step: Step) -> None:
        """Make one call."""
        calls: dict[str, Callable[..., None]] = {
            "launch": self.launch,
            "record": self.record,
            "wait": self.wait,
        }
        calls[step.op](*step.args)

    def stream(self, role: str) -> Stream:
        return self.bench.accelerator.stream(Role(role))

    def event(self, number: int) -> Event:
        return self.events.setdefault(number, self.bench.accelerator.event())

    def launch(self, role: str) -> None:
        row, flags, number = self.rows[self.launched], self.flags, self.launched
        self.launched += 1

        def mark() -> None:
            row.copy_(flags)
            flags[number] = 1

        self.bench.disturb(self.stream(role))
        self.stream(role).launch(mark)

    def record(self, number: int, role: str) -> None:
        self.stream(role).record(self.event(number))

    def wait(self, role: str, number: int) -> None:
        self.stream(role).wait(self.event(number))


def desk(bench: Bench) -> _Desk:
    """A desk with all flags down."""
    flags = bench.filled((MOST_LAUNCHES,), 0)
    return _Desk(bench, flags, bench.filled((MOST_LAUNCHES, MOST_LAUNCHES), 0))


def _play(bench: Bench, found: Program) -> Play:
    work, order = desk(bench), Order()
    for step in found.steps:
        work.do(step)
        _follow(order, step)
        yield NEXT
    bench.drain()
    seen = work.rows.cpu().to(torch.bool)
    _judge(order, seen.tolist())


def _judge(order: Order, seen: list[list[bool]]) -> None:
    for first, second in order.pairs():
        clause = "O1" if order.same_stream(first, second) else "O2"
        early = f"launch {second} ran before launch {first}"
        demand(clause, seen[second][first] and not seen[first][second], early)


def _unrecorded(_: Traits) -> st.SearchStrategy[Program]:
    return st.builds(lambda s: program([Step("wait", (s, 0))]), st.sampled_from(ROLES))


def _play_unrecorded(bench: Bench, found: Program) -> Play:
    yield NEXT
    stream, event = (
        bench.accelerator.stream(Role(found.steps[0].args[0])),
        bench.accelerator.event(),
    )
    demand("O3", not event.query(), "a fresh event says that it was reached")
    for what, call in (
        ("stream.wait", lambda: stream.wait(event)),
        ("event.synchronize", lambda: event.synchronize(bench.patience)),
    ):
        raised = attempt(call, EventNotRecorded)
        demand("O3", raised, f"{what} on an event that was never recorded raised nothing")


PROPERTIES = (
    Property(
        name="launches-run-in-the-order-that-streams-and-events-give",
        family=FAMILY,
        clauses=("O1", "O2", "O4"),
        claim="A launch sees everything that streams and events order before it.",
        programs=_programs,
        play=_play,
    ),
    Property(
        name="an-unrecorded-event-cannot-be-waited-for",
        family=FAMILY,
        clauses=("O3",),
        claim="Waiting on a never-recorded event raises, on streams and on the host.",
        programs=_unrecorded,
        play=_play_unrecorded,
    ),
)
