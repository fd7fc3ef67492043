"""Family *ordering*: order of launches, events, and streams that have failed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import chain

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance.context import NEXT, Play, RankContext, catch, require, to_host
from equipoise.hal.conformance.fixtures.happens_before import HappensBefore
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.property import (
    Property,
    Traits,
    all_of,
    concurrent_roles,
    concurrent_streams,
    holdable_stream,
)
from equipoise.hal.errors import EventNotRecorded, StreamFailed, StreamTimeout
from equipoise.hal.stream import Event, Role, Stream

MAX_FAILED_STREAM_STEPS = 6


class PlannedError(Exception):
    """What the programs of these programs raise."""


def _failed_stream_programs(_: Traits) -> st.SearchStrategy[Program]:
    """Calls on one stream; one of them launches what raises."""
    step = st.sampled_from(("launch", "record", "raise")).map(Step)
    steps = st.lists(step, max_size=MAX_FAILED_STREAM_STEPS // 2)
    step_lists = st.tuples(steps, st.just([Step("raise")]), steps)
    role = st.sampled_from([role.value for role in Role])
    return st.builds(
        lambda parts, role: make_program(chain(*parts), settings={"role": role}), step_lists, role
    )


@dataclass
class _FailedStreamRunner:
    """The calls of a program on one stream.

    Attributes:
        flags: uint8, one a launch, raised when it runs.
        raised: what the launched programs raise, in the order of issue.
        events: recorded after the first program that raises.
        expected_launches: numbers of the launches that came before the first program that raises.
    """

    ctx: RankContext
    stream: Stream
    flags: Tensor
    raised: list[PlannedError] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    expected_launches: set[int] = field(default_factory=set)
    launched: int = 0

    def run_step(self, step: Step) -> None:
        """Make one call; it may already know of the failure."""
        calls = {"launch": self.launch, "raise": self.launch_raising, "record": self.record}
        refusal = catch(calls[step.op], StreamFailed)
        if refusal is not None:
            self.require_first_cause(step.op, refusal)

    def launch(self) -> None:
        number, flags = self.launched, self.flags
        self.launched += 1
        if not self.raised:
            self.expected_launches.add(number)
        self.stream.launch(lambda: flags[number].fill_(1))

    def launch_raising(self) -> None:
        cause = PlannedError(f"number {len(self.raised)}")
        self.raised.append(cause)

        def make_program() -> None:
            raise cause

        self.stream.launch(make_program)

    def record(self) -> None:
        event = self.ctx.accelerator.event()
        self.stream.record(event)
        if self.raised:
            self.events.append(event)

    def require_first_cause(self, what: str, refusal: BaseException | None) -> None:
        """The call raised, and its cause is what was raised first."""
        require("E7", refusal, f"{what} on a stream that has failed raised nothing")
        cause = refusal.__cause__ if refusal is not None else None
        expected = self.raised[0] if self.raised else None
        require("E7", cause is expected, f"{what} blames {cause!r} instead of {expected!r}")


def _play_failed_stream(ctx: RankContext, program: Program) -> Play:
    stream = ctx.accelerator.stream(Role(str(program.setting("role"))))
    before = ctx.accelerator.event()
    stream.record(before)
    runner = _FailedStreamRunner(ctx, stream, ctx.full((MAX_FAILED_STREAM_STEPS,), 0))
    for step in program.steps:
        runner.run_step(step)
        yield NEXT
    for what, call in _last_calls(ctx, runner, before).items():
        runner.require_first_cause(what, catch(call, StreamFailed))
    _passed_on(ctx, stream, runner)
    ran = {number for number, flag in enumerate(runner.flags.tolist()) if flag}
    require(
        "E7",
        ran == runner.expected_launches,
        f"launches {sorted(ran)} ran, not {sorted(runner.expected_launches)}",
    )


def _last_calls(
    ctx: RankContext, runner: _FailedStreamRunner, before: Event
) -> dict[str, Callable[[], None]]:
    """Every call must raise once `synchronize`, the first of them, has raised."""
    stream, event = runner.stream, ctx.accelerator.event()
    calls: dict[str, Callable[[], None]] = {
        "synchronize": partial(stream.synchronize, ctx.timeout),
        "launch": lambda: stream.launch(lambda: None),
        "wait": partial(stream.wait, before),
        "record": partial(stream.record, event),
        "the second synchronize": partial(stream.synchronize, ctx.timeout),
        "the accelerator's synchronize": partial(ctx.accelerator.synchronize, ctx.timeout),
    }
    for number, recorded in enumerate(runner.events):
        calls[f"event {number}'s synchronize"] = partial(recorded.synchronize, ctx.timeout)
    return calls


def _passed_on(ctx: RankContext, stream: Stream, runner: _FailedStreamRunner) -> None:
    """A stream that waits for a failed recording fails, at the call or when it gets there."""
    other_streams = [ctx.accelerator.stream(role) for role in Role if role != stream.role]
    for event, other in zip(runner.events, other_streams, strict=False):
        refusal = catch(partial(other.wait, event), StreamFailed)
        refusal = refusal or catch(partial(other.synchronize, ctx.timeout), StreamFailed)
        require("E7", refusal, "a stream that waits for a recording which failed goes on")


FAILED_STREAM = Property(
    name="a-failed-stream-raises-at-every-call",
    family="ordering",
    clauses=("E7",),
    claim="After a program raised, nothing more runs on its stream, and calls raise that cause.",
    programs=_failed_stream_programs,
    play=_play_failed_stream,
)


EVENTS = 2
MAX_EVENT_STEPS = 7
EVENT_ROLES = tuple(role.value for role in Role)[:2]
MAX_QUERIES = 40
"""How often an event is asked until it has to be waited for."""


def _event_programs(_: Traits) -> st.SearchStrategy[Program]:
    """`launch(role, event)` of a mark and a recording after it, then queries of events."""
    event, role = st.integers(0, EVENTS - 1), st.sampled_from(EVENT_ROLES)
    steps = st.one_of(
        st.builds(lambda r, e: Step("launch", (r, e)), role, event),
        st.builds(lambda e: Step("query", (e,)), event),
        st.builds(lambda e: Step("synchronize", (e,)), event),
        st.just(Step("pause")),
    )
    first = st.builds(lambda r, e: Step("launch", (r, e)), role, event)
    return st.builds(
        lambda first, following: make_program([first, *following]),
        first,
        st.lists(steps, max_size=MAX_EVENT_STEPS),
    )


@dataclass
class _EventRunner:
    """Each launch increments a number; an event expects the number at its recording.

    Attributes:
        marks: int, one a stream: how many launches of it have run.
        expected: by event, the stream and the count of its latest recording.
        require_launch_ran: by event, whether it has reported that it was reached.
    """

    ctx: RankContext
    marks: dict[str, Tensor]
    launched: dict[str, int] = field(default_factory=dict)
    events: dict[int, Event] = field(default_factory=dict)
    expected: dict[int, tuple[str, int]] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)

    def stream(self, role: str) -> Stream:
        return self.ctx.accelerator.stream(Role(role))

    def launch(self, role: str, event: int) -> None:
        """A delay of the executor's choice, a mark, a recording."""
        stream, mark = self.stream(role), self.marks[role]
        self.ctx.inject_delay(stream)
        self.launched[role] = count = self.launched.get(role, 0) + 1
        stream.launch(lambda: mark.fill_(count))
        self.events.setdefault(event, self.ctx.accelerator.event())
        stream.record(self.events[event])
        self.expected[event] = (role, count)
        self.reached.discard(event)

    def query(self, event: int) -> bool:
        """Ask; what is reached has run, and stays reached."""
        if event not in self.events:
            return False
        reached = self.events[event].query()
        what = f"event {event} was reached, and is not any more"
        require("O7", reached or event not in self.reached, what)
        if reached:
            self.require_launch_ran(event, "query says that it was reached")
        return reached

    def synchronize(self, event: int) -> None:
        """Wait; what was waited for has run, and says so."""
        if event in self.events:
            self.events[event].synchronize(self.ctx.timeout)
            self.require_launch_ran(event, "synchronize has returned")
            require("O7", self.events[event].query(), f"event {event} was waited for, query denies")

    def require_launch_ran(self, event: int, why: str) -> None:
        """Launches before its recording have run."""
        self.reached.add(event)
        role, count = self.expected[event]
        launch_count = int(to_host(self.marks[role]))
        require(
            "O7", launch_count >= count, f"event {event}: {why}, ahead of launch {count} on {role}"
        )


def _play_events(ctx: RankContext, program: Program) -> Play:
    runner = _EventRunner(ctx, {role: ctx.full((1,), 0) for role in EVENT_ROLES})
    for step in program.steps:
        if step.op == "launch":
            runner.launch(str(step.args[0]), int(step.args[1]))
            runner.query(int(step.args[1]))
        elif step.op == "query":
            runner.query(int(step.args[0]))
        elif step.op == "synchronize":
            runner.synchronize(int(step.args[0]))
        yield NEXT
    ctx.drain()
    for event in runner.events:
        reached = any(runner.query(event) for _ in range(MAX_QUERIES))
        require("O7", reached, f"all streams have drained, and event {event} is not reached")


EVENT_POINTS = Property(
    name="an-event-says-when-its-point-is-reached",
    family="ordering",
    clauses=("O7",),
    claim="Neither query nor synchronize is ahead of what was launched, or behind for ever.",
    programs=_event_programs,
    play=_play_events,
)


FAMILY = "ordering"
MAX_LAUNCHES = 8
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
        st.builds(_launch_and_record, launch, event),
        st.builds(_wait_and_launch, launch, event),
        st.builds(_hand_over, event, st.permutations(roles), st.sampled_from(HAND_OVERS)),
        st.just([Step("pause")]),
    )
    return st.lists(pieces, min_size=least, max_size=most).map(lambda parts: list(chain(*parts)))


def _launch_and_record(launch: Step, event: int) -> list[Step]:
    return [launch, Step("record", (event, launch.args[0]))]


def _wait_and_launch(launch: Step, event: int) -> list[Step]:
    return [Step("wait", (launch.args[0], event)), launch]


HAND_OVERS = ("plain", "record", "drop")
"""What becomes of the event while it is waited for."""


def _hand_over(event: int, roles: list[str], then: str) -> list[Step]:
    """From one stream to another; `then` the event is recorded again, or dropped."""
    first, second, last = roles[0], roles[-1], roles[len(roles) // 2]
    *start, end = [
        *_launch_and_record(Step("launch", (first,)), event),
        *_wait_and_launch(Step("launch", (second,)), event),
    ]
    between = {
        "plain": [],
        "record": [Step("record", (event, last))],
        "drop": [Step("drop", (event,))],
    }
    return [*start, *between[then], end]


def _valid(steps: list[Step]) -> list[Step]:
    """Without waits on what was never recorded, and with a bounded number of launches."""
    order, valid = HappensBefore(), []
    for step in steps:
        if step.op == "wait" and not order.is_recorded(int(step.args[1])):
            continue
        if step.op in ("launch", "nest") and len(order.launches) >= MAX_LAUNCHES:
            continue
        _apply_to_model(order, step)
        valid.append(step)
    return valid


def _apply_to_model(order: HappensBefore, step: Step) -> None:
    """What the step means to the oracle."""
    for _ in range({"launch": 1, "hold": 1, "nest": 2}.get(step.op, 0)):
        order.launch(str(step.args[0]))
    if step.op == "record":
        order.record(int(step.args[0]), str(step.args[1]))
    elif step.op == "drop":
        order.forget(int(step.args[0]))
    elif step.op == "wait":
        order.wait(str(step.args[0]), int(step.args[1]))


def _launch_programs(_: Traits) -> st.SearchStrategy[Program]:
    """`nest(role)` launches a program that launches another, on the same stream."""
    nests = st.lists(st.sampled_from(ROLES).map(lambda role: Step("nest", (role,))), max_size=1)
    step_lists = st.tuples(_steps(ROLES, 0, 3), nests, _steps(ROLES, 1, 3))
    return step_lists.map(lambda parts: make_program(_valid(list(chain(*parts)))))


def _held_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """One stream is held at some point, often after a recording of its own."""
    roles = concurrent_roles(traits)[: len(ROLES)]
    steps = _steps(roles, least=0, most=3)
    hold = st.builds(_hold, st.sampled_from(roles), st.integers(0, 1))
    step_lists = st.tuples(steps, hold, steps)
    return step_lists.map(lambda parts: make_program(_valid(list(chain(*parts)))))


def _hold(role: str, records: int) -> list[Step]:
    return [*_launch_and_record(Step("launch", (role,)), 0) * records, Step("hold", (role,))]


@dataclass
class _LaunchRunner:
    """The calls of a program on real streams and events.

    Every launch first copies the flags of all launches to a row of its own, then raises its own
    flag; so each row says which launches had run before.
    """

    ctx: RankContext
    flags: Tensor
    rows: Tensor
    events: dict[int, Event] = field(default_factory=dict)
    launched: int = 0
    release: Callable[[], None] = lambda: None

    def run_step(self, step: Step) -> None:
        """Make one call."""
        calls: dict[str, Callable[..., None]] = {
            "launch": self.launch,
            "record": self.record,
            "wait": self.wait,
            "hold": self.hold,
            "drop": self.drop,
            "nest": self.nest,
        }
        calls[step.op](*step.args)

    def stream(self, role: str) -> Stream:
        return self.ctx.accelerator.stream(Role(role))

    def drop(self, number: int) -> None:
        """Forget the event, whoever may wait for it; the next recording is into a new one."""
        self.events.pop(number, None)

    def event(self, number: int) -> Event:
        return self.events.setdefault(number, self.ctx.accelerator.event())

    def launch(self, role: str) -> None:
        self.ctx.inject_delay(self.stream(role))
        self.stream(role).launch(self.next_mark())

    def nest(self, role: str) -> None:
        """What is launched inside a program runs there, ahead of the rest of the program."""
        stream, inner, outer = self.stream(role), self.next_mark(), self.next_mark()

        def program() -> None:
            stream.launch(inner)
            outer()

        self.ctx.inject_delay(stream)
        stream.launch(program)

    def next_mark(self) -> Callable[[], None]:
        """What the next launch does."""
        row, flags, number = self.rows[self.launched], self.flags, self.launched
        self.launched += 1

        def mark() -> None:
            row.copy_(flags)
            # Not by an assignment: torch.cuda copies a scalar from pageable memory for one, and
            # waits for the stream.
            flags[number : number + 1].fill_(1)

        return mark

    def record(self, number: int, role: str) -> None:
        self.stream(role).record(self.event(number))

    def wait(self, role: str, number: int) -> None:
        self.stream(role).wait(self.event(number))

    def hold(self, role: str) -> None:
        """To the oracle this is a launch that does not run until it is released."""
        self.release = self.ctx.hold(self.stream(role))
        self.launch(role)

    def record_after(self, role: str) -> Event:
        """A new event after all that was launched on the stream."""
        event = self.ctx.accelerator.event()
        self.stream(role).record(event)
        return event

    def judge(self, order: HappensBefore, clause: str) -> None:
        """Drain, then compare what every launch saw with what it had to see."""
        stuck = catch(self.ctx.drain, StreamTimeout)
        require(clause, not stuck, f"a stream stands still though nothing is due any more: {stuck}")
        matrix = self.rows.cpu().to(torch.bool).tolist()
        for first, second in order.pairs():
            violated_clause = "O1" if order.same_stream(first, second) else clause
            early = f"launch {second} ran before launch {first}"
            require(violated_clause, matrix[second][first] and not matrix[first][second], early)


def _launch_runner(ctx: RankContext) -> _LaunchRunner:
    """Flags that are all down."""
    most = MAX_LAUNCHES + 2  # the hold has a number too, and a nested launch has two
    return _LaunchRunner(ctx, ctx.full((most,), 0), ctx.full((most, most), 0))


def _violated_clause(steps: tuple[Step, ...]) -> str:
    """O4 where an event is recorded again after a wait for it, else O2."""
    waited: set[object] = set()
    for step in steps:
        if step.op == "wait":
            waited.add(step.args[1])
        elif step.op == "drop":
            waited.discard(step.args[0])
        elif step.op == "record" and step.args[0] in waited:
            return "O4"
    return "O2"


def _play_launches(ctx: RankContext, program: Program) -> Play:
    runner, order = _launch_runner(ctx), HappensBefore()
    for step in program.steps:
        if step.op == "pause":
            yield NEXT
            continue
        runner.run_step(step)
        _apply_to_model(order, step)
    runner.judge(order, _violated_clause(program.steps))


def _play_held(ctx: RankContext, program: Program) -> Play:
    runner, order = _launch_runner(ctx), HappensBefore()
    clause = _violated_clause(program.steps)
    passed: dict[int, Event] = {}
    for step in program.steps:
        if step.op == "pause":
            yield NEXT
            continue
        runner.run_step(step)
        _apply_to_model(order, step)
        if step.op == "launch":
            passed[runner.launched - 1] = runner.record_after(str(step.args[0]))
    hold = [step.op for step in program.steps if step.op in ("launch", "hold")].index("hold")
    for number, event in passed.items():
        if not order.before(hold, number):
            late = catch(partial(event.synchronize, ctx.timeout), StreamTimeout)
            require(clause, not late, f"launch {number} is held up, though nothing orders it so")
    runner.release()
    runner.judge(order, clause)


MANY = 300
"""Launches on one stream, and events: pools and queues of vendors have a size."""


def _many_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """`many(from, to)`: the stream that has many launches, and the one that waits for events."""
    roles = concurrent_roles(traits)
    return st.permutations(roles).map(lambda pair: make_program([Step("many", tuple(pair[:2]))]))


def _play_many(ctx: RankContext, program: Program) -> Play:
    """Each launch is recorded into an event of its own.

    The last event is recorded on a stream that is held, so that a stream which waits for all others
    shows whether each of them is still its own.
    """
    first, second = (ctx.accelerator.stream(Role(str(r))) for r in program.steps[0].args)
    number, flag = ctx.full((1,), 1, torch.int64), ctx.full((1,), 0)
    events = [ctx.accelerator.event() for _ in range(MANY)]
    places = ctx.copy_of(torch.arange(MANY))
    release = ctx.hold(first)
    for place, event in enumerate(events[:-1]):
        first.launch(partial(_append, number, places[place : place + 1]))
        first.record(event)
    release()
    yield NEXT
    ctx.drain(first)
    late = [place for place, event in enumerate(events[:-1]) if not _is_reached(event)]
    require("O7", not late, f"the stream has drained, and events {late[:5]} are not reached")
    expected = reduce(_appended, range(MANY - 1), 1)
    require(
        "O1", int(to_host(number)) % WORD == expected, f"{MANY - 1} launches ran in another order"
    )
    release = ctx.hold(first)
    first.record(events[-1])
    for event in events[:-1]:
        second.wait(event)
    second.launch(partial(flag.fill_, 1))
    stuck = catch(partial(ctx.drain, second), StreamTimeout)
    require("O2", not stuck, f"one of {MANY} events stands for what was recorded into another")
    release()
    second.wait(events[-1])
    ctx.drain()


def _is_reached(event: Event) -> bool:
    return any(event.query() for _ in range(MAX_QUERIES))


def _append(number: Tensor, place: Tensor) -> None:
    """Not the same in another order; one kernel, since a device's queue of them is limited."""
    torch.add(place, number, alpha=FACTOR, out=number)


def _appended(number: int, place: int) -> int:
    return (number * FACTOR + place) % WORD


FACTOR, WORD = 1009, 1 << 64
"""What each launch multiplies a number by, and where an int64 begins anew."""


def _unrecorded_programs(_: Traits) -> st.SearchStrategy[Program]:
    return st.builds(lambda s: make_program([Step("wait", (s, 0))]), st.sampled_from(ROLES))


def _play_unrecorded(ctx: RankContext, program: Program) -> Play:
    yield NEXT
    stream, event = (
        ctx.accelerator.stream(Role(str(program.steps[0].args[0]))),
        ctx.accelerator.event(),
    )
    require("O3", not event.query(), "a fresh event says that it was reached")
    for what, call in (
        ("stream.wait", lambda: stream.wait(event)),
        ("event.synchronize", lambda: event.synchronize(ctx.timeout)),
    ):
        error = catch(call, EventNotRecorded)
        require("O3", error, f"{what} on an event that was never recorded raised nothing")


PROPERTIES = (
    Property(
        name="launches-run-in-the-order-that-streams-and-events-give",
        family=FAMILY,
        clauses=("O1", "O2", "O4"),
        claim="A launch sees everything that streams and events order before it.",
        programs=_launch_programs,
        play=_play_launches,
    ),
    Property(
        name="a-held-launch-holds-up-only-what-is-ordered-behind-it",
        family=FAMILY,
        clauses=("O1", "O2", "O4"),
        claim="What no event orders behind a launch runs while that launch cannot.",
        programs=_held_programs,
        play=_play_held,
        needs=holdable_stream,
    ),
    FAILED_STREAM,
    EVENT_POINTS,
    Property(
        name="hundreds-of-launches-and-events-are-kept-apart",
        family=FAMILY,
        clauses=("O2", "O1", "O7"),
        claim="Hundreds of launches on one stream run in order, and hundreds of events stay apart.",
        programs=_many_programs,
        play=_play_many,
        needs=all_of(holdable_stream, concurrent_streams),
        large=True,
    ),
    Property(
        name="an-unrecorded-event-cannot-be-waited-for",
        family=FAMILY,
        clauses=("O3",),
        claim="Waiting on a never-recorded event raises, on streams and on the host.",
        programs=_unrecorded_programs,
        play=_play_unrecorded,
    ),
)
