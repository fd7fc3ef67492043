"""Family *ordering*: who runs after whom."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance.bench import NEXT, Bench, Play, attempt, demand
from equipoise.hal.conformance.broken_streams import BROKEN_STREAM
from equipoise.hal.conformance.event_queries import EVENT_POINTS
from equipoise.hal.conformance.model import Order
from equipoise.hal.conformance.needs import a_held_stream, side_by_side
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.errors import EventNotRecorded, StreamTimeout
from equipoise.hal.stream import Event, Role, Stream

FAMILY = "ordering"
EVENTS = 2
MOST_LAUNCHES = 8
ROLES = tuple(role.value for role in Role)[:3]


def _steps(roles: tuple[str, ...], least: int, most: int) -> st.SearchStrategy[list[Step]]:
    """Calls, valid or not yet: those that cannot be made are left out of the program.

    Most of what is drawn is one end of a hand-over: calls by themselves seldom add up to one.
    Between two calls the device moves only where there is a pause.
    """
    role, event = st.sampled_from(roles), st.integers(0, EVENTS - 1)
    launch = role.map(lambda role: Step("launch", (role,)))
    pieces = st.one_of(
        launch.map(lambda step: [step]),
        st.builds(_give, launch, event),
        st.builds(_take, launch, event),
        st.builds(_hand_over, event, st.permutations(roles), st.integers(0, 1)),
        st.just([Step("pause")]),
    )
    return st.lists(pieces, min_size=least, max_size=most).map(lambda drawn: list(chain(*drawn)))


def _give(launch: Step, event: int) -> list[Step]:
    return [launch, Step("record", (event, launch.args[0]))]


def _take(launch: Step, event: int) -> list[Step]:
    return [Step("wait", (launch.args[0], event)), launch]


def _hand_over(event: int, roles: list[str], again: int) -> list[Step]:
    """From one stream to another; the event is recorded `again` times while it is waited for."""
    first, second, last = roles[0], roles[-1], roles[len(roles) // 2]
    *start, end = [
        *_give(Step("launch", (first,)), event),
        *_take(Step("launch", (second,)), event),
    ]
    return [*start, *[Step("record", (event, last))] * again, end]


def _valid(steps: list[Step]) -> list[Step]:
    """Without waits on what was never recorded, and with a bounded number of launches."""
    order, kept = Order(), []
    for step in steps:
        if step.op == "wait" and not order.recorded(int(step.args[1])):
            continue
        if step.op == "launch" and len(order.launches) >= MOST_LAUNCHES:
            continue
        _follow(order, step)
        kept.append(step)
    return kept


def _follow(order: Order, step: Step) -> None:
    """What the step means to the oracle."""
    if step.op in ("launch", "hold"):
        order.launch(str(step.args[0]))
    elif step.op == "record":
        order.record(int(step.args[0]), str(step.args[1]))
    elif step.op == "wait":
        order.wait(str(step.args[0]), int(step.args[1]))


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    return _steps(ROLES, least=2, most=6).map(lambda steps: program(_valid(steps)))


def _held_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """One stream is held somewhere on the way, often behind a recording of its own."""
    roles = side_by_side(traits)[: len(ROLES)]
    steps = _steps(roles, least=0, most=3)
    hold = st.builds(_hold, st.sampled_from(roles), st.integers(0, 1))
    drawn = st.tuples(steps, hold, steps)
    return drawn.map(lambda parts: program(_valid(list(chain(*parts)))))


def _hold(role: str, records: int) -> list[Step]:
    return [*_give(Step("launch", (role,)), 0) * records, Step("hold", (role,))]


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
    let_go: Callable[[], None] = lambda: None

    def do(self, step: Step) -> None:
        """Make one call."""
        calls: dict[str, Callable[..., None]] = {
            "launch": self.launch,
            "record": self.record,
            "wait": self.wait,
            "hold": self.hold,
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

    def hold(self, role: str) -> None:
        """To the oracle this is a launch: one that does not run until it is let go."""
        self.let_go = self.bench.hold(self.stream(role))
        self.launch(role)

    def passed(self, role: str) -> Event:
        """A fresh event behind all that was launched on the stream."""
        event = self.bench.accelerator.event()
        self.stream(role).record(event)
        return event

    def judge(self, order: Order, clause: str) -> None:
        """Drain, then compare what every launch saw with what it had to see."""
        stuck = attempt(self.bench.drain, StreamTimeout)
        demand(clause, not stuck, f"a stream stands still though nothing is due any more: {stuck}")
        seen = self.rows.cpu().to(torch.bool).tolist()
        for first, second in order.pairs():
            blamed = "O1" if order.same_stream(first, second) else clause
            early = f"launch {second} ran before launch {first}"
            demand(blamed, seen[second][first] and not seen[first][second], early)


def _desk(bench: Bench) -> _Desk:
    """A desk with all flags down."""
    most = MOST_LAUNCHES + 1  # the hold has a number too
    return _Desk(bench, bench.filled((most,), 0), bench.filled((most, most), 0))


def _blamed(steps: tuple[Step, ...]) -> str:
    """O4 where an event is recorded again after a wait for it, else O2."""
    waited: set[object] = set()
    for step in steps:
        if step.op == "wait":
            waited.add(step.args[1])
        elif step.op == "record" and step.args[0] in waited:
            return "O4"
    return "O2"


def _play(bench: Bench, found: Program) -> Play:
    desk, order = _desk(bench), Order()
    for step in found.steps:
        if step.op == "pause":
            yield NEXT
            continue
        desk.do(step)
        _follow(order, step)
    desk.judge(order, _blamed(found.steps))


def _play_held(bench: Bench, found: Program) -> Play:
    desk, order = _desk(bench), Order()
    clause = _blamed(found.steps)
    passed: dict[int, Event] = {}
    for step in found.steps:
        if step.op == "pause":
            yield NEXT
            continue
        desk.do(step)
        _follow(order, step)
        if step.op == "launch":
            passed[desk.launched - 1] = desk.passed(str(step.args[0]))
    hold = [step.op for step in found.steps if step.op in ("launch", "hold")].index("hold")
    for number, event in passed.items():
        if not order.before(hold, number):
            late = attempt(partial(event.synchronize, bench.patience), StreamTimeout)
            demand(clause, not late, f"launch {number} is held up, though nothing orders it so")
    desk.let_go()
    desk.judge(order, clause)


def _unrecorded(_: Traits) -> st.SearchStrategy[Program]:
    return st.builds(lambda s: program([Step("wait", (s, 0))]), st.sampled_from(ROLES))


def _play_unrecorded(bench: Bench, found: Program) -> Play:
    yield NEXT
    stream, event = (
        bench.accelerator.stream(Role(str(found.steps[0].args[0]))),
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
        name="a-held-launch-holds-up-only-what-is-ordered-behind-it",
        family=FAMILY,
        clauses=("O1", "O2", "O4"),
        claim="What no event orders behind a launch runs while that launch cannot.",
        programs=_held_programs,
        play=_play_held,
        needs=a_held_stream,
    ),
    BROKEN_STREAM,
    EVENT_POINTS,
    Property(
        name="an-unrecorded-event-cannot-be-waited-for",
        family=FAMILY,
        clauses=("O3",),
        claim="Waiting on a never-recorded event raises, on streams and on the host.",
        programs=_unrecorded,
        play=_play_unrecorded,
    ),
)
