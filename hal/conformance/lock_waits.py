"""Family *locks*: streams that wait for a signal."""

from collections.abc import Callable
from functools import partial
from itertools import chain

from hypothesis import strategies as st

from equipoise.hal.conformance import beside
from equipoise.hal.conformance.bench import NEXT, Bench, Play, Until, attempt, demand
from equipoise.hal.conformance.needs import a_lock, all_of, several_streams, side_by_side
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.errors import LockMisuse, LockPoisoned, StreamError, StreamTimeout
from equipoise.hal.lock import StreamLock
from equipoise.hal.stream import Event, Role, Stream

FAMILY = "locks"
MOST_WAITERS = 3
BRIEF = 0.02
"""Seconds for a wait that may end in vain."""


def _waiters(traits: Traits, least: int) -> st.SearchStrategy[list[Step]]:
    role = st.sampled_from(side_by_side(traits))
    waits = role.map(lambda role: Step("wait", (role,)))
    return st.lists(waits, min_size=least, max_size=MOST_WAITERS)


def _one_signal(traits: Traits) -> st.SearchStrategy[Program]:
    """Waiters, the signal before or between them, and at least one waiter."""
    drawn = st.tuples(_waiters(traits, 0), st.just([Step("signal")]), _waiters(traits, 0))
    both = st.tuples(drawn, _waiters(traits, 1))
    return both.map(lambda parts: program(chain(*parts[0], parts[1])))


def _section(bench: Bench, lock: StreamLock, role: str) -> Event:
    """Acquire and release on the stream; an event behind the acquire."""
    stream, entered = bench.accelerator.stream(Role(role)), bench.accelerator.event()
    lock.acquire(stream)
    stream.record(entered)
    lock.release(stream)
    return entered


def _play_one_signal(bench: Bench, found: Program) -> Play:
    lock = bench.accelerator.stream_lock(bench.patience)
    entered: list[Event] = []
    for step in found.steps:
        if step.op == "signal":
            demand("L1", not _count(entered), "a waiter went on before any signal")
            lock.signal(lock.epoch)
        else:
            entered.append(_section(bench, lock, str(step.args[0])))
        yield NEXT
    demand("L1", _any_soon(bench, entered), "one signal was given, and no waiter goes on")
    for event in entered:
        attempt(partial(event.synchronize, BRIEF), StreamTimeout)
    gone = _count(entered)
    demand("L1", gone == 1, f"one signal let {gone} of {len(entered)} waiters go on")
    lock.poison()
    bench.drain()


def _count(events: list[Event]) -> int:
    """How many were reached."""
    return sum(event.query() for event in events)


def _any_soon(bench: Bench, events: list[Event]) -> bool:
    """Whether one of them is reached while patience lasts."""
    rounds = int(bench.patience / BRIEF / len(events)) + 1
    return any(
        attempt(partial(event.synchronize, BRIEF), StreamTimeout) is None
        for _ in range(rounds)
        for event in events
    )


def _deserted(traits: Traits) -> st.SearchStrategy[Program]:
    return _waiters(traits, 1).map(program)


def _play_deserted(bench: Bench, found: Program) -> Play:
    """Nobody signals."""
    lock = bench.accelerator.stream_lock(BRIEF)
    entered = []
    for step in found.steps:
        entered.append(_section(bench, lock, str(step.args[0])))
        yield NEXT
    yield Until(lambda: _count(entered) == len(entered), "the poison of a lock nobody signals")
    late = attempt(bench.drain, StreamTimeout)
    demand("L6", not late, "the deadline of the lock has passed, and a stream still waits")
    _poisoned(lock)
    epoch = lock.drain(bench.patience)
    told = attempt(lock.check, LockPoisoned)
    demand("L6", not told, f"epoch {epoch} begins poisoned: {told}")


def _poisoned(lock: StreamLock) -> None:
    """Every verb of the mover says that the epoch is void."""
    calls: dict[str, tuple[Callable[[], None], tuple[type[StreamError], ...]]] = {
        "check": (lock.check, (LockPoisoned,)),
        "signal": (partial(lock.signal, lock.epoch), (LockPoisoned,)),
        # The mover owns the slots, so that to wait is wrong for two reasons.
        "wait": (partial(lock.wait, lock.epoch, BRIEF), (LockPoisoned, LockMisuse)),
    }
    for what, (call, allowed) in calls.items():
        demand("L6", attempt(call, *allowed), f"{what} says nothing of the poison")


def _play_beside(bench: Bench, found: Program) -> Play:
    return beside.play(bench, found, "L4", partial(_stop, bench))


def _stop(bench: Bench, stream: Stream) -> Callable[[], None]:
    lock = bench.accelerator.stream_lock(bench.patience)
    lock.acquire(stream)
    return partial(lock.signal, lock.epoch)


ONE_WAITER = Property(
    name="one-signal-lets-one-waiter-go-on",
    family=FAMILY,
    clauses=("L1",),
    claim="Of all waiters, early and late, on any streams, one signal releases exactly one.",
    programs=_one_signal,
    play=_play_one_signal,
    needs=a_lock,
)
DEADLINE = Property(
    name="a-lock-that-nobody-signals-is-poisoned",
    family=FAMILY,
    clauses=("L6",),
    claim="At the lock's deadline all waiters go on, and the epoch is void until the lock drains.",
    programs=_deserted,
    play=_play_deserted,
    needs=a_lock,
)
BESIDE = Property(
    name="a-stream-that-waits-for-a-signal-leaves-the-device-free",
    family=FAMILY,
    clauses=("L4",),
    claim="While streams wait for signals, the others run what is launched on them.",
    programs=beside.programs,
    play=_play_beside,
    needs=all_of(a_lock, several_streams),
)
