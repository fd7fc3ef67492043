"""The stream lock of a device, and the watchdog that bounds its waits.

An acquire makes a stream wait for a flag of its own; the host sets the flag when the writer
signals. A release makes the stream set one flag that the host polls. The host keeps a list of the
acquires that are in progress, and matches signals and releases to them.

The device cannot time out a stream that waits for a flag. So one thread per accelerator, the
watchdog, polls the locks that have such streams, and poisons a lock whose stream has waited for
longer than the deadline.

**Locks.** `DeviceStreamLock._changed` guards the host's bookkeeping and is held for short. It is
never held while something is launched: a launch can block in the driver on a full queue, and the
signal that lets that queue move must not wait for it.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from equipoise.backends.common.bounded_wait import poll
from equipoise.backends.devices.event import DeviceEvent
from equipoise.backends.devices.issue_lock import DeviceStreamOp
from equipoise.backends.devices.lock_flags import AcquireFlag, LockFlags
from equipoise.backends.devices.runtime import Device
from equipoise.backends.devices.stream import own_stream
from equipoise.hal.errors import (
    LockMisuse,
    LockPoisoned,
    StaleEpoch,
    StreamFailed,
    StreamTimeout,
)
from equipoise.hal.stream import Stream
from equipoise.hal.support.native_call_guard import NATIVE_CALL_GUARD

POLL_INTERVAL = 0.005
"""Seconds between two polls while an acquire waits. The watchdog only detects deadlines of seconds
and delivers signals after a poison, so it can be slow; the writer's own signal does not go through
it."""
STOP_TIMEOUT = 5.0
"""Maximum seconds that `stop` waits for the thread: it may be inside a call of the driver that does
not return. It is a daemon thread, so the process can end without it."""


class WatchedLock(Protocol):
    """A lock that the watchdog polls."""

    def tick(self, now: float) -> bool:
        """Poll once, at time `now` of the monotonic clock. Returns whether to poll again."""
        ...

    def on_watchdog_failure(self, failure: BaseException) -> None:
        """Called after `tick` raised: the lock is not polled any more and has to report it."""
        ...


class LockWatchdog:
    """Polls the locks of one accelerator on one thread.

    The thread starts with the first acquire and ends with the accelerator. The watchdog refers to a
    lock only while an acquire of it waits, so that dropped locks are freed.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._watched: dict[WatchedLock, None] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def add(self, lock: WatchedLock) -> None:
        """Poll `lock` from now on, until its `tick` returns False."""
        with self._changed:
            self._watched[lock] = None
            if self._thread is None and not self._stopped:
                name = f"equipoise.{self._device.torch}.locks"
                self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def check_all(self) -> None:
        """Poll all locks once, on the calling thread."""
        for lock in list(self._watched):
            # Remove before the poll: an acquire that adds the lock during the poll must not be
            # removed by the result of a poll that did not see it.
            with self._changed:
                self._watched.pop(lock, None)
            if self._tick(lock):
                with self._changed:
                    self._watched[lock] = None

    def stop(self) -> None:
        """End the thread. Waits at most `STOP_TIMEOUT` seconds."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT)

    def _work(self) -> None:
        self._device.set_current()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._watched)
                if self._stopped:
                    return
            # The interpreter waits at its end for threads that are inside the guard: one that is
            # unwound in a call of the driver would abort the process.
            with NATIVE_CALL_GUARD:
                self.check_all()
            time.sleep(POLL_INTERVAL)  # outside the guard: an exit does not wait for it

    def _tick(self, lock: WatchedLock) -> bool:
        try:
            return lock.tick(time.monotonic())
        except BaseException as failure:  # the thread has to go on polling the other locks
            lock.on_watchdog_failure(failure)
            return False


class _DeviceLockState(Enum):
    """Who owns the slots, as far as the host knows. `READS` ends when the device sets the release
    flag, which the host sees only when the writer waits for it."""

    WRITES = "the writer owns the slots"
    FULL = "the slots may be read"
    READS = "a stream may read the slots, and has not released them"


@dataclass(eq=False)
class _PendingAcquire:
    """One acquire in progress: work launched after it, up to its release, reads the slots.

    Attributes:
        flag: the flag that it waits for.
        stream: the stream that waits.
        before_wait: recorded before the wait, or before the graph that contains the wait.
        after_wait: recorded after it.
        has_signal: whether its flag was set.
        release_issued: whether its release was issued.
        waiting_since: when the watchdog first saw the stream at the wait, by the monotonic clock.
    """

    flag: AcquireFlag
    stream: Stream
    before_wait: DeviceEvent
    after_wait: DeviceEvent
    has_signal: bool = False
    release_issued: bool = False
    waiting_since: float | None = None


class DeviceStreamLock:
    """Hands slots over between the streams of a device and the writer's thread.

    The host lists every acquire in progress, in the order of issue, and gives each signal to the
    first one without a signal. Each acquire has a flag of its own, so a signal lets exactly one
    stream continue. Releases are matched to acquires when they are issued, so a release without an
    acquire does nothing. A replay repeats the bookkeeping of the acquires and releases in the
    graph; their flags are part of the captured graph.

    Args:
        flags: makes flags of the device.
        deadline: seconds that a stream may wait for a signal before the lock is poisoned.
        watchdog: of the accelerator.
    """

    def __init__(self, flags: LockFlags, deadline: float, watchdog: LockWatchdog) -> None:
        self._flags = flags
        self._deadline = deadline
        self._watchdog = watchdog
        self._changed = threading.RLock()
        self._state = _DeviceLockState.WRITES
        self._epoch = 0
        self._poisoned = False
        self._release_flag = flags.release_flag()
        self._failure: BaseException | None = None
        self._free_flags: list[AcquireFlag] = []
        self._borrowed_flags: set[AcquireFlag] = set()
        self._acquires: list[_PendingAcquire] = []
        self._pending_events: list[DeviceEvent] = []
        self._issuing_count = 0

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._epoch

    def acquire(self, stream: Stream) -> None:
        """Make the stream wait for a signal of its own."""
        own = own_stream(stream)
        flag = self._flags.acquire_flag() if own.capturing else self._borrow_flag()
        try:
            own.issue(DeviceStreamOp(flag.wait, scope=lambda on: self._issuing_acquire(flag, on)))
        except BaseException:
            with self._changed:
                # The acquire was refused or its launch failed. Its flag leaves the pool, so that no
                # later acquire can meet a leftover of this one.
                self._borrowed_flags.discard(flag)
            raise

    def release(self, stream: Stream) -> None:
        """Let the writer write, as soon as the stream gets here.

        A replayed release without an acquire raises `LockMisuse`: a graph cannot leave it out.
        """
        own = own_stream(stream)
        # Under the issue lock, so that no other thread issues the same release between the check
        # and the launch.
        with own.issue_lock:
            if own.capturing or self._unreleased(own) is not None:
                own.issue(DeviceStreamOp(self._release_flag.set, scope=self._issuing_release))

    def wait(self, epoch: int, timeout: float) -> None:
        """Block until the stream has released."""
        with self._changed:
            self._check_epoch(epoch)
            if self._state is _DeviceLockState.WRITES:
                raise LockMisuse("the writer waits for slots that it owns")
        # Polled without the mutex: the streams go on acquiring and releasing meanwhile. Everything
        # is checked again under the mutex, since a poison or a new epoch may have come since.
        poll(lambda: self._poisoned or self._epoch != epoch or self._release_flag.is_set(), timeout)
        with self._changed:
            self._check_epoch(epoch)
            if not self._release_flag.is_set():
                raise StreamTimeout(f"no release within {timeout:g} s: {self._state.value}")
            self._state = _DeviceLockState.WRITES
            self._release_flag.clear()

    def signal(self, epoch: int) -> None:
        """Let one `acquire` go on."""
        with self._changed:
            self._check_epoch(epoch)
            if self._state is not _DeviceLockState.WRITES:
                raise LockMisuse(f"the writer signals out of turn: {self._state.value}")
            self._state = _DeviceLockState.FULL
            self._deliver_signals()

    def poison(self) -> None:
        """Release every waiter of this epoch."""
        with self._changed:
            self._poisoned = True
            self._deliver_signals()
            # A flag that several replays share is set again only after the earlier replay has
            # passed it; the watchdog delivers those signals.
            self._watchdog.add(self)

    def check(self) -> None:
        """Raise `LockPoisoned` if this epoch was poisoned."""
        with self._changed:
            if self._poisoned:
                message = f"the stream lock was poisoned in epoch {self._epoch}"
                why = f": {self._failure}" if self._failure is not None else ""
                raise LockPoisoned(message + why) from self._failure

    def drain(self, timeout: float) -> int:
        """Begin the next epoch, after everything of this one has passed on the device.

        What is launched in the meantime belongs to the old epoch and is waited for too: no acquire
        or release of one epoch takes effect in another (clause L3). Raises `StreamTimeout` after
        `timeout` seconds.
        """
        expiry = time.monotonic() + timeout
        while not self._next_epoch():
            remaining = max(expiry - time.monotonic(), 0.0)
            event = next(iter(self._pending_events), None)
            if event is not None:
                # A failed stream runs nothing any more, so there is nothing to wait for.
                with suppress(StreamFailed):
                    event.synchronize(remaining)
            elif not poll(lambda: not self._issuing_count, remaining):
                raise StreamTimeout(f"an operation of epoch {self._epoch} is still being issued")
        return self._epoch

    def tick(self, now: float) -> bool:
        """For the watchdog: poison at the deadline, and let poisoned waiters go on (clause L6)."""
        with self._changed:
            self._collect_done()
            if not self._poisoned and self._overdue(now):
                self._poisoned = True
                late = f"a stream waited {self._deadline:g} s for the writer's signal"
                self._failure = StreamTimeout(late)
            if self._poisoned:
                self._deliver_signals()
            return any(not acquire.has_signal for acquire in self._acquires)

    def on_watchdog_failure(self, failure: BaseException) -> None:
        """Poison the lock with the cause: without a watchdog nothing bounds its waits."""
        with self._changed:
            self._failure = failure
            self._poisoned = True

    @contextmanager
    def _issuing(self) -> Iterator[None]:
        """Counts a launch in progress, so that no epoch ends during it.

        A counter and not the mutex: a launch can block in the driver on a full queue, and the
        signal, the poison or the watchdog that empties the queue needs the mutex.
        """
        with self._changed:
            self._issuing_count += 1
        try:
            yield
        finally:
            with self._changed:
                self._issuing_count -= 1

    @contextmanager
    def _issuing_acquire(self, flag: AcquireFlag, stream: Stream) -> Iterator[None]:
        """Surrounds the wait of an acquire, or a replay that contains it."""
        acquire = _PendingAcquire(flag, stream, DeviceEvent(), DeviceEvent())
        with self._issuing():
            with self._changed:
                earlier = [s for s in self._acquires if s.flag is flag and s.stream is not stream]
                self._acquires.append(acquire)
            try:
                for earlier_acquire in earlier:
                    # Two streams that replay one graph wait for the same flag. Without an order
                    # between them one signal would let both continue.
                    stream.wait(earlier_acquire.after_wait)
                stream.record(acquire.before_wait)
                # Before the wait is launched: the launch may block until the wait has passed (a
                # full queue), so nothing after it can be relied on to deliver the signal.
                with self._changed:
                    self._deliver_signals()
                    self._watchdog.add(self)
                yield
                stream.record(acquire.after_wait)
            except BaseException:
                self._cancel_acquire(acquire)
                raise
            with self._changed:
                self._pending_events.append(acquire.after_wait)
                # Again: the watchdog drops a lock whose acquires all have their signals, and may
                # have done so during the launch. One more poll collects what has passed.
                self._watchdog.add(self)

    def _cancel_acquire(self, acquire: _PendingAcquire) -> None:
        """Remove an acquire whose launch failed. The next acquire gets its signal."""
        with self._changed:
            self._acquires.remove(acquire)
            self._borrowed_flags.discard(acquire.flag)
            if acquire.has_signal and not self._poisoned:
                self._state = _DeviceLockState.FULL
                self._deliver_signals()

    @contextmanager
    def _issuing_release(self, stream: Stream) -> Iterator[None]:
        """Surrounds the setting of the release flag, or a replay that contains it."""
        with self._issuing():
            with self._changed:
                acquire, release_event = self._unreleased(stream), DeviceEvent()
                if acquire is None:
                    raise LockMisuse("a replayed release has no acquire to follow")
                acquire.release_issued = True
            try:
                yield
                stream.record(release_event)
            except BaseException:
                acquire.release_issued = False
                raise
            with self._changed:
                self._pending_events.append(release_event)

    def _unreleased(self, stream: Stream) -> _PendingAcquire | None:
        """The acquire that a release on `stream` belongs to: the first of the same stream, else the
        first of any stream, since a release may be issued on another stream than its acquire."""
        with self._changed:
            unreleased = [acquire for acquire in self._acquires if not acquire.release_issued]
        own = [acquire for acquire in unreleased if acquire.stream is stream]
        return next(iter(own or unreleased), None)

    def _deliver_signals(self) -> None:
        """Signal the first acquire that has no signal; after a poison, signal all of them.

        A flag that several replays share is set again only after the earlier replay has cleared it:
        two signals stored into one flag would count as one, and the second stream would wait for
        ever.
        """
        for acquire in self._acquires:
            if acquire.has_signal or (self._poisoned and self._flag_in_use(acquire)):
                continue
            if not self._poisoned and self._state is not _DeviceLockState.FULL:
                return
            acquire.has_signal = True
            self._state = _DeviceLockState.READS
            acquire.flag.signal()

    def _flag_in_use(self, acquire: _PendingAcquire) -> bool:
        """Whether an earlier acquire waits for the same flag and may not have cleared it yet."""
        earlier = self._acquires[: self._acquires.index(acquire)]
        return any(
            s.flag is acquire.flag and not (s.has_signal and s.after_wait.query()) for s in earlier
        )

    def _overdue(self, now: float) -> bool:
        """Whether a stream has waited at an acquire for longer than the deadline.

        Only the first acquire without a signal of each stream can have been reached; the others are
        queued after it. The time counts from when the watchdog sees the stream at the wait, not
        from the launch: a stream may be busy with a long step before.
        """
        first: dict[Stream, _PendingAcquire] = {}
        for acquire in self._acquires:
            if not acquire.has_signal:
                first.setdefault(acquire.stream, acquire)
        for acquire in first.values():
            if acquire.waiting_since is None and acquire.before_wait.query():
                acquire.waiting_since = now
        wait_times = [
            now - acquire.waiting_since
            for acquire in first.values()
            if acquire.waiting_since is not None
        ]
        return max(wait_times, default=0.0) > self._deadline

    def _collect_done(self) -> None:
        """Drop the acquires that have passed; their flags can be used again."""
        self._pending_events = [event for event in self._pending_events if not event.query()]
        remaining: list[_PendingAcquire] = []
        for acquire in self._acquires:
            if acquire.release_issued and acquire.has_signal and acquire.after_wait.query():
                self._return_flag(acquire)
            else:
                remaining.append(acquire)
        self._acquires = remaining

    def _next_epoch(self) -> bool:
        """Begin the next epoch, unless a launch is in progress or not everything has passed."""
        with self._changed:
            self._collect_done()
            if self._poisoned:
                self._deliver_signals()
            if self._issuing_count or self._pending_events:
                return False
            for acquire in self._acquires:
                self._return_flag(acquire)
            self._acquires = []
            self._state, self._poisoned, self._failure = _DeviceLockState.WRITES, False, None
            self._release_flag.clear()
            self._epoch += 1
            return True

    def _borrow_flag(self) -> AcquireFlag:
        with self._changed:
            if not self._free_flags:
                self._collect_done()
            flag = self._free_flags.pop() if self._free_flags else self._flags.acquire_flag()
            self._borrowed_flags.add(flag)
            return flag

    def _return_flag(self, acquire: _PendingAcquire) -> None:
        """Put the flag back, unless a graph owns it or the vendor cannot use it again."""
        if acquire.flag in self._borrowed_flags:
            self._borrowed_flags.remove(acquire.flag)
            if acquire.flag.reusable:
                self._free_flags.append(acquire.flag)

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise StaleEpoch(f"a writer of epoch {epoch} in epoch {self._epoch}")
        self.check()
