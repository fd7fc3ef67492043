"""Family *timeouts*: waits of the host raise at their timeout, and not before.

No property measures time. A wait that must time out waits for something that stays still until the
host releases it; a wait that must not waits for something that a timer releases long before.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from hypothesis import strategies as st

from equipoise.hal.accelerator import HostPool
from equipoise.hal.communicator import Communicator
from equipoise.hal.conformance.context import (
    NEXT,
    Play,
    RankContext,
    catch,
    control_barrier,
    require,
)
from equipoise.hal.conformance.fixtures.comm_operations import UNMATCHED_BYTES, several_ranks
from equipoise.hal.conformance.fixtures.strategies import offered, offers_any, one_common_size
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.property import (
    DeadlineLength,
    Property,
    PropertyScope,
    Traits,
    all_of,
    lock_support,
)
from equipoise.hal.errors import (
    CommunicatorFailed,
    EquipoiseError,
    LockPoisoned,
    PoolExhausted,
    ResultPending,
    StreamTimeout,
)
from equipoise.hal.lock import StreamLock
from equipoise.hal.stream import Event, Role, Stream
from equipoise.hal.work import Work

FAMILY = "timeouts"
EXPIRING_WAIT = 0.02
"""Seconds of a wait that ends in vain."""
HOLD_TIMEOUT = 5.0
"""Seconds that a stream is held if nothing releases it: a wait without an end ends well then."""
RELEASE_DELAY = 0.15
"""Seconds after which a timer releases a stream that the host waits for."""
LATE_PEER_FRACTION = 0.4
"""The part of an operation's deadline after which its peer comes."""
IDLE_FRACTION = 1.2
"""How many deadlines a communicator is idle before its first operation."""
PAGE_BYTES = 8


@dataclass
class _HeldStream:
    """A stream that is blocked by a lock, and everything that waits for it.

    Attributes:
        stream: blocked until the lock is signalled.
        gate: the lock that holds it.
        lock: a lock that the stream holds, and releases once it continues.
        event: recorded on the blocked stream.
        pool: of one page, given back after that event.
    """

    ctx: RankContext
    stream: Stream
    gate: StreamLock
    lock: StreamLock
    event: Event
    pool: HostPool

    def release(self) -> None:
        """Signal, once; a lock that was poisoned too early has released it already, and fails."""
        with suppress(LockPoisoned):
            self.gate.signal(self.gate.epoch)

    def waits(self) -> Mapping[str, Callable[[float], object]]:
        """Every wait of the host for the blocked stream."""
        return {
            "stream": self.stream.synchronize,
            "event": self.event.synchronize,
            "accelerator": self.ctx.accelerator.synchronize,
            "lock": partial(self.lock.wait, self.lock.epoch),
            "drain": self.lock.drain,
            "pool": self.pool.take,
        }


WAITS = ("stream", "event", "accelerator", "lock", "drain", "pool")


def _hold_stream(ctx: RankContext, role: str) -> _HeldStream:
    """The stream holds a lock, and then waits for a signal that does not come."""
    accelerator, stream = ctx.accelerator, ctx.accelerator.stream(Role(role))
    condition, lock = accelerator.stream_lock(HOLD_TIMEOUT), accelerator.stream_lock(ctx.timeout)
    pool, point = accelerator.host_pool(PAGE_BYTES, 1), accelerator.event()
    page = pool.take(ctx.timeout)
    lock.acquire(stream)
    lock.signal(lock.epoch)
    condition.acquire(stream)
    lock.release(stream)
    stream.record(point)
    page.give_back(point)
    return _HeldStream(ctx, stream, condition, lock, point, pool)


def _roles() -> st.SearchStrategy[str]:
    return st.sampled_from([role.value for role in Role][:2])


def _expiring_wait_programs(_: Traits) -> st.SearchStrategy[Program]:
    """`wait(what)` that time out, some of them; all of them follow when the stream was released."""
    waits = st.lists(st.sampled_from(WAITS), min_size=1, max_size=4)
    return st.builds(
        lambda role, names: make_program(
            [Step("wait", (n,)) for n in names], settings={"role": role}
        ),
        _roles(),
        waits,
    )


def _play_expiring_waits(ctx: RankContext, program: Program) -> Play:
    stopped = _hold_stream(ctx, str(program.setting("role")))
    yield NEXT
    for step in program.steps:
        name = str(step.args[0])
        error = catch(partial(stopped.waits()[name], EXPIRING_WAIT), StreamTimeout, PoolExhausted)
        expected = PoolExhausted if name == "pool" else StreamTimeout
        text = "nothing" if error is None else f"{type(error).__name__}: {error}"
        what = f"a wait of {EXPIRING_WAIT:g} s for a {name} that stands still raised {text}"
        require("E11", isinstance(error, expected), what)
        require("E11", not stopped.event.query(), f"{what}, after the point was reached")
        yield NEXT
    stopped.release()
    yield NEXT
    for name in ("event", "stream", "accelerator", "lock", "pool"):
        failed = catch(partial(stopped.waits()[name], ctx.timeout), EquipoiseError)
        require("E11", not failed, f"after a time-out, a wait for the {name} raised {failed!r}")
    failed = catch(partial(stopped.event.synchronize, 0.0), EquipoiseError)
    require(
        "E11", not failed, f"a wait without time for a point that was reached raised {failed!r}"
    )


def _late_release_programs(_: Traits) -> st.SearchStrategy[Program]:
    """`wait(what)` of every kind for a stream that a timer releases."""
    return _roles().map(
        lambda role: make_program([Step("wait", (n,)) for n in WAITS], settings={"role": role})
    )


@contextmanager
def _call_after(seconds: float, call: Callable[[], None]) -> Iterator[None]:
    """Run `call` in another thread after that many seconds."""
    timer = threading.Timer(seconds, call)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def _play_late_release(ctx: RankContext, program: Program) -> Play:
    for step in program.steps:
        name = str(step.args[0])
        stopped = _hold_stream(ctx, str(program.setting("role")))
        with _call_after(RELEASE_DELAY, stopped.release):
            failed = catch(partial(stopped.waits()[name], ctx.timeout), EquipoiseError)
        text = f"raised {failed!r}, which was ahead of its time-out"
        require(
            "E11", not failed, f"a wait for a {name} that comes after {RELEASE_DELAY:g} s {text}"
        )
        ctx.drain()
        poisoned = catch(stopped.gate.check, LockPoisoned)
        require("E11", not poisoned, f"a lock was poisoned ahead of its deadline: {poisoned}")
        yield NEXT


def _has_own_clock(traits: Traits) -> bool:
    """Whether there is a clock, and no schedule decides when something happens."""
    return not traits.controlled and not traits.steered


LATE_PEER_OPS = ("irecv", "isend", "barrier")


def _late_peer_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """The operation, perhaps on a communicator that has been idle for longer than its deadline."""
    ops = st.sampled_from(offered(traits, LATE_PEER_OPS)).map(Step)
    idle = st.sampled_from(([], [Step("idle")]))
    return st.builds(
        lambda size, idle, op: make_program([*idle, op], size), one_common_size(traits), idle, ops
    )


def _play_late_peer(ctx: RankContext, program: Program) -> Play:
    """The last rank comes late, and well within the deadline."""
    comm = yield from ctx.communicator()
    *idle, step = program.steps
    if idle:
        time.sleep(IDLE_FRACTION * ctx.deadline)
    yield from control_barrier(ctx, f"{comm.purpose}/opened")
    if comm.rank == comm.size - 1:
        time.sleep(LATE_PEER_FRACTION * ctx.deadline)
    work = _issue_part(ctx, comm, step.op)
    if work is None:
        return
    failed = catch(partial(work.result, ctx.timeout), CommunicatorFailed, ResultPending)
    when = f"whose peer came after {LATE_PEER_FRACTION:g} of its deadline"
    require("E11", not failed, f"rank {ctx.rank}: {step.op}, {when}, failed: {failed!r}")


def _issue_part(ctx: RankContext, comm: Communicator, op: str) -> Work | None:
    """Between the first rank and the last; of other operations every rank's part."""
    if op == "barrier":
        return comm.barrier()
    ends = (0, comm.size - 1)
    if comm.rank not in ends:
        return None
    peer = ends[comm.rank == 0]
    sends = (op == "isend") == (comm.rank == 0)
    buffer = ctx.full((UNMATCHED_BYTES,), comm.rank)
    return comm.isend(buffer, peer) if sends else comm.irecv(buffer, peer)


PROPERTIES = (
    Property(
        name="a-wait-raises-at-its-timeout",
        family=FAMILY,
        clauses=("E11",),
        claim="Every wait of the host raises at its time-out, and may be repeated.",
        programs=_expiring_wait_programs,
        play=_play_expiring_waits,
        needs=lock_support,
    ),
    Property(
        name="a-wait-does-not-raise-before-its-timeout",
        family=FAMILY,
        clauses=("E11",),
        claim="What comes ahead of the time-out ends every wait well, and poisons no lock.",
        programs=_late_release_programs,
        play=_play_late_release,
        needs=lock_support,
        applies_to=_has_own_clock,
        large=True,
    ),
    Property(
        name="an-operation-does-not-fail-before-its-deadline",
        family=FAMILY,
        clauses=("E11",),
        claim="A peer that comes late, within the deadline, finds the operation waiting, also on a "
        "communicator that was idle.",
        programs=_late_peer_programs,
        play=_play_late_peer,
        needs=all_of(several_ranks, offers_any(*LATE_PEER_OPS)),
        applies_to=_has_own_clock,
        scope=PropertyScope.GROUP,
        deadline=DeadlineLength.SHORT,
    ),
)
