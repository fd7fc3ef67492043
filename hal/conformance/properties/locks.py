"""Family *locks*: hand-over of slots between a stream and a thread on the host.

Also streams that wait for a signal, locks in captured graphs, and calls in any order, compared with
a model of the lock.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.accelerator import Graph
from equipoise.hal.conformance.context import NEXT, Play, RankContext, Until, catch, require
from equipoise.hal.conformance.fixtures import stopped_streams
from equipoise.hal.conformance.fixtures.lock_model import ExpectedErrors, LockModel
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.property import (
    Property,
    Traits,
    all_of,
    concurrent_roles,
    concurrent_streams,
    graph_support,
    independent_copies,
    lock_support,
)
from equipoise.hal.errors import LockMisuse, LockPoisoned, StreamError, StreamTimeout
from equipoise.hal.lock import StreamLock
from equipoise.hal.slots import Segment, SlotLayout, SlotStore
from equipoise.hal.stream import Event, Role, Stream

SLOTS = 2
SLOT_BYTES = 8
MAX_TURNS = 4
MODEL, WRITER = 0, 1


def _turn_programs(_: Traits) -> st.SearchStrategy[Program]:
    """The slots that the writer writes in each turn; the model reads all of them."""
    slots = st.sets(st.integers(0, SLOTS - 1), min_size=1).map(sorted)
    turns = st.lists(slots, min_size=1, max_size=MAX_TURNS)
    return turns.map(
        lambda slot_lists: make_program(step for slots in slot_lists for step in _turn(slots))
    )


def _turn(slots: list[int]) -> tuple[Step, Step]:
    return Step("write", tuple(slots), thread=WRITER), Step("read", thread=MODEL)


@dataclass
class _TurnState:
    """What the two threads share.

    Attributes:
        weights: uint8 [SLOTS, SLOT_BYTES], 0 at first; turn k writes k + 1 into every byte.
        lock: between them.
        store: of these slots.
        launched: sections that the model has launched.
        signalled: turns that the writer has finished.
    """

    weights: Tensor
    lock: StreamLock
    store: SlotStore
    launched: int = 0
    signalled: int = 0

    def released(self, turns: int) -> bool:
        """Whether the model has launched that many releases."""
        return self.launched >= turns


def _turn_state(ctx: RankContext) -> _TurnState:
    """The one that both threads see: whoever comes second drops what it has made."""
    weights = ctx.full((SLOTS, SLOT_BYTES), 0)
    layout = SlotLayout(tuple((Segment("weight", row),) for row in weights), staging=1)
    lock = ctx.accelerator.stream_lock(ctx.timeout)
    mine = _TurnState(weights, lock, ctx.accelerator.slot_store(layout))
    turn_state: _TurnState = ctx.shared.setdefault("turn_state", mine)
    return turn_state


def _play_turns(ctx: RankContext, program: Program) -> Play:
    turn_state = _turn_state(ctx)
    yield NEXT
    if ctx.thread == MODEL:
        yield from _play_model(ctx, program, turn_state)
    else:
        yield from _play_writer(ctx, program, turn_state)


def _play_writer(ctx: RankContext, program: Program, turn_state: _TurnState) -> Play:
    copy = ctx.accelerator.stream(Role.COPY)
    for turn, step in enumerate(program.steps_of(0, WRITER)):
        if turn:
            yield Until(partial(turn_state.released, turn), "the model's release")
            late = catch(partial(turn_state.lock.wait, 0, ctx.timeout), StreamTimeout)
            require("O5", not late, f"the release of turn {turn - 1} never wakes the writer")
        slots = [int(slot) for slot in step.args]
        page = ctx.accelerator.pinned(SLOT_BYTES).fill_(turn + 1)
        turn_state.store.write(slots, [[page]] * len(slots), copy)
        yield NEXT
        late = catch(partial(copy.synchronize, ctx.timeout), StreamTimeout)
        require("L5", not late, "a copy from the host does not end while a launched stream waits")
        turn_state.lock.signal(0)
        turn_state.signalled += 1
        yield NEXT


def _play_model(ctx: RankContext, program: Program, turn_state: _TurnState) -> Play:
    compute = ctx.accelerator.stream(Role.COMPUTE)
    turns = len(program.steps_of(0, MODEL))
    rows = ctx.full((turns, SLOTS, SLOT_BYTES), 0)
    for row in rows:
        turn_state.lock.acquire(compute)
        yield NEXT
        for half in (slice(None, SLOT_BYTES // 2), slice(SLOT_BYTES // 2, None)):
            compute.launch(partial(row[:, half].copy_, turn_state.weights[:, half]))
            ctx.inject_delay(compute)
            yield NEXT
        turn_state.lock.release(compute)
        turn_state.launched += 1
        yield NEXT
    yield Until(lambda: turn_state.signalled == turns, "the writer's last signal")
    late = catch(partial(compute.synchronize, ctx.timeout), StreamTimeout)
    require("O5", not late, "the last signal never wakes the model")
    _require_turns(program, rows)


def _require_turns(program: Program, rows: Tensor) -> None:
    """Every section sees each slot as the latest turn up to its own has left it, whole."""
    expected = [0] * SLOTS
    for turn, (step, row) in enumerate(
        zip(program.steps_of(0, WRITER), rows.tolist(), strict=True)
    ):
        for slot in step.args:
            expected[int(slot)] = turn + 1
        for slot, (values, turn_due) in enumerate(zip(row, expected, strict=True)):
            what = f"in turn {turn} slot {slot} reads as {values}, not as {turn_due} throughout"
            require("O5", max(values) <= turn_due, f"the writer overtook a reader: {what}")
            require(
                "L7", min(values) >= turn_due, f"released onto what was not written yet: {what}"
            )


TURNS = Property(
    name="the-lock-alternates-writer-and-reader",
    family="locks",
    clauses=("O5", "L5", "L7"),
    claim="Each section between acquire and release sees the slots as one turn left them, whole.",
    programs=_turn_programs,
    play=_play_turns,
    needs=all_of(lock_support, independent_copies, concurrent_streams),
    threads=2,
)


FAMILY = "locks"
MAX_WAITERS = 3
SHORT_WAIT = 0.02
"""Seconds for a wait that may end in vain."""


def _waiters(traits: Traits, least: int) -> st.SearchStrategy[list[Step]]:
    role = st.sampled_from(concurrent_roles(traits))
    waits = role.map(lambda role: Step("wait", (role,)))
    return st.lists(waits, min_size=least, max_size=MAX_WAITERS)


def _one_signal_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """Waiters, the signal before or between them, and at least one waiter."""
    first_thread = st.tuples(_waiters(traits, 0), st.just([Step("signal")]), _waiters(traits, 0))
    both = st.tuples(first_thread, _waiters(traits, 1))
    return both.map(lambda parts: make_program(chain(*parts[0], parts[1])))


def _acquire_and_release(ctx: RankContext, lock: StreamLock, role: str) -> Event:
    """Acquire and release on the stream; an event after the acquire."""
    stream, entered = ctx.accelerator.stream(Role(role)), ctx.accelerator.event()
    lock.acquire(stream)
    stream.record(entered)
    lock.release(stream)
    return entered


def _play_one_signal(ctx: RankContext, program: Program) -> Play:
    """Another lock is signalled first, which lets nobody go on who waits for this one."""
    lock, other = (ctx.accelerator.stream_lock(ctx.timeout) for _ in range(2))
    other.signal(other.epoch)
    entered: list[Event] = []
    for step in program.steps:
        if step.op == "signal":
            require("L1", not _reached_count(entered), "a waiter went on before any signal")
            refused = catch(partial(lock.signal, lock.epoch), LockMisuse)
            require("L1", not refused, f"another lock was signalled, and this one says {refused}")
        else:
            entered.append(_acquire_and_release(ctx, lock, str(step.args[0])))
        yield NEXT
    require("L1", _any_reached(ctx, entered), "one signal was given, and no waiter goes on")
    for event in entered:
        catch(partial(event.synchronize, SHORT_WAIT), StreamTimeout)
    passed_count = _reached_count(entered)
    require(
        "L1", passed_count == 1, f"one signal let {passed_count} of {len(entered)} waiters go on"
    )
    lock.poison()
    ctx.drain()


def _reached_count(events: list[Event]) -> int:
    """How many were reached."""
    return sum(event.query() for event in events)


def _any_reached(ctx: RankContext, events: list[Event]) -> bool:
    """Whether one of them is reached before the time-out."""
    rounds = int(ctx.timeout / SHORT_WAIT / len(events)) + 1
    return any(
        catch(partial(event.synchronize, SHORT_WAIT), StreamTimeout) is None
        for _ in range(rounds)
        for event in events
    )


def _unsignalled_programs(traits: Traits) -> st.SearchStrategy[Program]:
    return _waiters(traits, 1).map(make_program)


def _play_unsignalled(ctx: RankContext, program: Program) -> Play:
    """Nobody signals."""
    lock = ctx.accelerator.stream_lock(SHORT_WAIT)
    entered = []
    for step in program.steps:
        entered.append(_acquire_and_release(ctx, lock, str(step.args[0])))
        yield NEXT
    yield Until(
        lambda: _reached_count(entered) == len(entered), "the poison of a lock nobody signals"
    )
    late = catch(ctx.drain, StreamTimeout)
    require("L6", not late, "the deadline of the lock has passed, and a stream still waits")
    _require_poisoned(lock)
    epoch = lock.drain(ctx.timeout)
    error = catch(lock.check, LockPoisoned)
    require("L6", not error, f"epoch {epoch} begins poisoned: {error}")


def _require_poisoned(lock: StreamLock) -> None:
    """Every call of the writer raises that the epoch is void."""
    calls: dict[str, tuple[Callable[[], None], tuple[type[StreamError], ...]]] = {
        "check": (lock.check, (LockPoisoned,)),
        "signal": (partial(lock.signal, lock.epoch), (LockPoisoned,)),
        # The writer owns the slots, so waiting is wrong for two reasons.
        "wait": (partial(lock.wait, lock.epoch, SHORT_WAIT), (LockPoisoned, LockMisuse)),
    }
    for what, (call, allowed) in calls.items():
        require("L6", catch(call, *allowed), f"{what} says nothing of the poison")


def _play_other_streams(ctx: RankContext, program: Program) -> Play:
    return stopped_streams.play_with_stopped_streams(
        ctx, program, "L4", partial(_stop_by_lock, ctx)
    )


def _stop_by_lock(ctx: RankContext, stream: Stream) -> Callable[[], None]:
    lock = ctx.accelerator.stream_lock(ctx.timeout)
    lock.acquire(stream)
    return partial(lock.signal, lock.epoch)


ONE_WAITER = Property(
    name="one-signal-lets-one-waiter-go-on",
    family=FAMILY,
    clauses=("L1",),
    claim="Of all waiters, early and late, on any streams, one signal releases exactly one, and "
    "none of another lock.",
    programs=_one_signal_programs,
    play=_play_one_signal,
    needs=lock_support,
)
UNSIGNALLED = Property(
    name="an-unsignalled-lock-is-poisoned-at-its-deadline",
    family=FAMILY,
    clauses=("L6",),
    claim="At the lock's deadline all waiters go on, and the epoch is void until the lock drains.",
    programs=_unsignalled_programs,
    play=_play_unsignalled,
    needs=lock_support,
)
OTHER_STREAMS = Property(
    name="other-streams-run-while-one-waits-for-a-signal",
    family=FAMILY,
    clauses=("L4",),
    claim="While streams wait for signals, the others run what is launched on them.",
    programs=stopped_streams.launch_and_stop_programs,
    play=_play_other_streams,
    needs=all_of(lock_support, concurrent_streams),
)


VALUE_BYTES = 8


def _captured_lock_programs(_: Traits) -> st.SearchStrategy[Program]:
    """Replays and turns of the writer, either of which may be ahead of the other."""
    steps = st.lists(st.sampled_from(("replay", "write")).map(Step), min_size=1, max_size=8)
    return steps.map(lambda steps: make_program(_valid_replays(steps)))


def _valid_replays(steps: list[Step]) -> list[Step]:
    """The writer writes again only after the replay that reads was launched."""
    valid: list[Step] = []
    for step in steps:
        launched = valid.count(Step("replay"))
        most = MAX_TURNS if step.op == "replay" else min(MAX_TURNS, launched + 1)
        if valid.count(step) < most:
            valid.append(step)
    return valid


@dataclass
class _CapturedLockRunner:
    """A graph of acquire, read and release, and what its replays have read.

    Attributes:
        value: uint8 [NBYTES]; turn k writes k + 1 into every byte.
        read: uint8 [NBYTES], where the graph copies `value` to.
        rows: uint8 [MAX_TURNS, NBYTES], `read` after each replay.
        replay_events: events after the replays.
    """

    ctx: RankContext
    lock: StreamLock
    graph: Graph
    value: Tensor
    read: Tensor
    rows: Tensor
    replay_events: list[Event] = field(default_factory=list)
    turns_written: int = 0

    def stream(self) -> Stream:
        return self.ctx.accelerator.stream(Role.COMPUTE)

    def capture(self) -> None:
        """Once, before everything."""

        def section() -> None:
            self.lock.acquire(self.stream())
            self.stream().launch(partial(self.read.copy_, self.value))
            self.lock.release(self.stream())

        self.graph.capture(self.stream(), section)

    def replay(self) -> None:
        self.graph.replay(self.stream())
        self.stream().launch(partial(self.rows[len(self.replay_events)].copy_, self.read))
        self.replay_events.append(self.ctx.accelerator.event())
        self.stream().record(self.replay_events[-1])

    def write(self) -> Play:
        timeout = self.ctx.timeout
        if self.turns_written:
            turn = self.turns_written - 1
            late = catch(partial(self.lock.wait, 0, timeout), StreamTimeout)
            require(_violated_clause(turn), not late, f"replay {turn} never releases")
        copy = self.ctx.accelerator.stream(Role.COPY)
        copy.launch(partial(self.value.fill_, self.turns_written + 1))
        copy.synchronize(timeout)
        yield NEXT
        self.lock.signal(0)
        self.turns_written += 1

    def check_replays(self) -> None:
        """No replay goes through without a signal of its own."""
        passed = sum(event.query() for event in self.replay_events)
        what = f"replay {passed - 1} went through after {self.turns_written} signals"
        require(_violated_clause(passed - 1), passed <= self.turns_written, what)


def _violated_clause(turn: int) -> str:
    """What fails at the first replay was not captured; what fails later did not reset itself."""
    return "L2" if turn else "O6"


def _play_captured_lock(ctx: RankContext, program: Program) -> Play:
    opened = ctx.accelerator
    value, read = ctx.full((VALUE_BYTES,), 0), ctx.full((VALUE_BYTES,), 0)
    rows = ctx.full((MAX_TURNS, VALUE_BYTES), 0)
    runner = _CapturedLockRunner(
        ctx, opened.stream_lock(ctx.timeout), opened.graph(), value, read, rows
    )
    runner.capture()
    for step in program.steps:
        if step.op == "replay":
            runner.replay()
        else:
            yield from runner.write()
        yield NEXT
        runner.check_replays()
    yield from _end(ctx, runner)


def _end(ctx: RankContext, runner: _CapturedLockRunner) -> Play:
    """Give the signals that are still missing, then compare what was read."""
    while runner.turns_written < len(runner.replay_events):
        yield from runner.write()
    late = catch(partial(runner.stream().synchronize, ctx.timeout), StreamTimeout)
    require("O6", not late, "every replay has its signal, and the stream still waits")
    for turn, row in enumerate(runner.rows[: len(runner.replay_events)].tolist()):
        what = f"replay {turn} reads {row}, not {turn + 1} throughout"
        require(_violated_clause(turn), row == [turn + 1] * VALUE_BYTES, what)


CAPTURED_LOCK = Property(
    name="a-captured-lock-hands-over-at-every-replay",
    family="locks",
    clauses=("O6", "L2"),
    claim="Captured once, every replay waits for a signal of its own and reads what it announced.",
    programs=_captured_lock_programs,
    play=_play_captured_lock,
    needs=all_of(lock_support, graph_support, concurrent_streams),
)


EXPIRING_WAIT = 0.02
"""Seconds for a wait that must end in vain."""
LOCK_OPS = ("section", "signal", "wait", "drain", "poison", "late signal", "late wait")
MAX_LOCK_STEPS = 10
HANDOVER_ROUNDS = (("signal", "section", "wait"), ("section", "signal", "wait"))
"""One hand-over and back, the signal early or late: calls in random order seldom reach that."""
MAX_ROUNDS = 4


def _lock_programs(_: Traits) -> st.SearchStrategy[Program]:
    operations = st.lists(st.sampled_from(LOCK_OPS), min_size=1, max_size=MAX_LOCK_STEPS)
    rounds = st.lists(st.sampled_from(HANDOVER_ROUNDS), min_size=2, max_size=MAX_ROUNDS)
    op_lists = st.one_of(operations, rounds.map(lambda parts: list(chain(*parts))))
    return op_lists.map(lambda ops: make_program(_valid_lock_steps([Step(op) for op in ops])))


def _valid_lock_steps(steps: list[Step]) -> list[Step]:
    """Nobody is late in the first epoch."""
    model, valid = LockModel(), []
    for step in steps:
        if model.epoch or not step.op.startswith("late"):
            _expected_errors(model, step.op)
            valid.append(step)
    return valid


def _expected_errors(model: LockModel, op: str) -> ExpectedErrors:
    """What the model says to a step."""
    operations: dict[str, Callable[[], ExpectedErrors]] = {
        "section": model.section,
        "signal": model.signal,
        "wait": model.wait,
        "drain": model.drain,
        "poison": model.poison,
        "late signal": model.late_call,
        "late wait": model.late_call,
    }
    return operations[op]()


@dataclass
class _LockRunner:
    """A lock, one stream, and the events after its acquires."""

    ctx: RankContext
    lock: StreamLock
    stream: Stream
    model: LockModel = field(default_factory=LockModel)
    section_events: list[Event] = field(default_factory=list)

    def run_step(self, op: str) -> None:
        """Make one call, and compare what it raises with what the model says."""
        epoch, clause = self.model.epoch, self.clause(op)
        expected = _expected_errors(self.model, op)
        timeout = EXPIRING_WAIT if expected == (StreamTimeout,) else self.ctx.timeout
        error = catch(partial(self.call, op, epoch, timeout), StreamError)
        fits = isinstance(error, expected) if expected else error is None
        names = " or ".join(kind.__name__ for kind in expected) or "nothing"
        require(clause, fits, f"{op} in epoch {epoch} raised {error!r}, not {names}")

    def call(self, op: str, epoch: int, timeout: float) -> None:
        lock = self.lock
        calls: dict[str, Callable[[], object]] = {
            "section": self.section,
            "signal": partial(lock.signal, epoch),
            "wait": partial(lock.wait, epoch, timeout),
            "drain": partial(lock.drain, timeout),
            "poison": lock.poison,
            "late signal": partial(lock.signal, epoch - 1),
            "late wait": partial(lock.wait, epoch - 1, timeout),
        }
        calls[op]()

    def section(self) -> None:
        event = self.ctx.accelerator.event()
        self.lock.acquire(self.stream)
        self.stream.record(event)
        self.lock.release(self.stream)
        self.section_events.append(event)

    def clause(self, op: str) -> str:
        """Which one a wrong answer breaks: void epochs first, then those that are not the first."""
        if op == "poison" or (self.model.poisoned and not op.startswith("late")):
            return "L6"
        return "L3" if self.model.epoch or op == "drain" else "O5"

    def check_visible_state(self) -> None:
        """Compare the state that the host can query at any time."""
        model, clause = self.model, self.clause("look")
        require("L3", self.lock.epoch == model.epoch, f"epoch {self.lock.epoch}, not {model.epoch}")
        error = catch(self.lock.check, *model.check() or (StreamError,))
        require(clause, bool(error) == model.poisoned, f"check says {error!r}")
        inside = sum(event.query() for event in self.section_events)
        what = f"{inside} sections have begun, though only {model.sections_passed} may"
        require(clause, inside <= model.sections_passed, what)

    def check_sections(self) -> None:
        """What may pass passes, and nothing else."""
        clause = self.clause("look")
        for number, event in enumerate(self.section_events):
            expected = number < self.model.sections_passed
            timeout = self.ctx.timeout if expected else EXPIRING_WAIT
            late = catch(partial(event.synchronize, timeout), StreamTimeout)
            require(
                clause, (late is None) == expected, f"section {number}: passed is {late is None}"
            )


def _play_lock(ctx: RankContext, program: Program) -> Play:
    stream = ctx.accelerator.stream(Role.COMPUTE)
    runner = _LockRunner(ctx, ctx.accelerator.stream_lock(ctx.timeout), stream)
    for step in program.steps:
        runner.run_step(step.op)
        yield NEXT
        runner.check_visible_state()
    runner.check_sections()
    runner.lock.poison()
    ctx.drain()


EPOCHS = Property(
    name="lock-calls-match-the-lock-model",
    family="locks",
    clauses=("O5", "L3", "L6"),
    claim="Out of turn, late or void: every operation says so, nothing leaks into the next epoch.",
    programs=_lock_programs,
    play=_play_lock,
    needs=lock_support,
)


PROPERTIES = (TURNS, ONE_WAITER, CAPTURED_LOCK, EPOCHS, UNSIGNALLED, OTHER_STREAMS)
