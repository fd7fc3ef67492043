"""The watchdog of stream locks: a stream that waits cannot time out by itself.

The stream lock: a word for each acquire under way, and one that releases set.
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
from equipoise.backends.devices.issuing import DeviceStreamOp
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
"""Seconds between two looks while some acquire waits."""
STOP_TIMEOUT = 5.0
"""Seconds that stopping waits for the thread."""


class WatchedLock(Protocol):
    """What the watchdog looks after."""

    def tick(self, now: float) -> bool:
        """Look, at that time of the monotonic clock; whether to be looked after still."""
        ...

    def on_watchdog_failure(self, failure: BaseException) -> None:
        """Looking raised this, and nobody looks any more: say so to whoever asks."""
        ...


class LockWatchdog:
    """One thread an accelerator, started with the first acquire and ended with the accelerator.

    It holds a lock only as long as something of that lock is under way.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._watched: dict[WatchedLock, None] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def add(self, lock: WatchedLock) -> None:
        """Look after `lock` from now on."""
        with self._changed:
            self._watched[lock] = None
            if self._thread is None and not self._stopped:
                name = f"equipoise.{self._device.torch}.locks"
                self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def check_all(self) -> None:
        """Look at all of them once, on the calling thread."""
        for lock in list(self._watched):
            # Taken out first: what is added while we look stays.
            with self._changed:
                self._watched.pop(lock, None)
            if self._tick(lock):
                with self._changed:
                    self._watched[lock] = None

    def stop(self) -> None:
        """End the thread; bounded."""
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
            with NATIVE_CALL_GUARD:
                self.check_all()
            time.sleep(POLL_INTERVAL)

    def _tick(self, lock: WatchedLock) -> bool:
        try:
            return lock.tick(time.monotonic())
        except BaseException as failure:  # this thread must look after the others still
            lock.on_watchdog_failure(failure)
            return False


class _DeviceLockState(Enum):
    """Whose turn it is, as the host knows it; the device tells the end of the last by a word."""

    WRITES = "the mover owns the slots"
    FULL = "the slots may be read"
    READS = "a stream may read the slots, and has not released them"


@dataclass(eq=False)
class _PendingAcquire:
    """One acquire under way: what is launched behind it, up to its release, reads the slots.

    Attributes:
        flag: that it waits for.
        stream: that it waits on.
        before_wait: recorded before the wait, or before the graph that the wait is a part of.
        after_wait: recorded behind it.
        has_signal: whether its signal was given.
        release_issued: whether its release was issued.
        waiting_since: when its wait was first seen to stand.
    """

    flag: AcquireFlag
    stream: Stream
    before_wait: DeviceEvent
    after_wait: DeviceEvent
    has_signal: bool = False
    release_issued: bool = False
    waiting_since: float | None = None


class DeviceStreamLock:
    """Hand-over between the device's streams and a mover's thread.

    The host knows every acquire that is under way, in the order of issue, and gives each signal to
    the first that has none; a word of its own lets exactly that one go on. Releases are matched to
    acquires when they are issued, so that one without an acquire gives nothing. A replay issues the
    bookkeeping of its acquires and releases anew; their words are part of the captured graph.
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
        """The epoch that runs."""
        return self._epoch

    def acquire(self, stream: Stream) -> None:
        """Make the stream wait for a signal of its own."""
        own = own_stream(stream)
        flag = self._flags.acquire_flag() if own.capturing else self._borrow_flag()
        try:
            own.issue(DeviceStreamOp(flag.wait, scope=lambda on: self._issuing_acquire(flag, on)))
        except BaseException:
            with self._changed:
                self._borrowed_flags.discard(flag)  # refused before anybody waited there
            raise

    def release(self, stream: Stream) -> None:
        """Let the mover write, once the stream has come here.

        A replayed release without an acquire to follow raises `LockMisuse`: it cannot be left out.
        """
        own = own_stream(stream)
        with own.issue_lock:
            if own.capturing or self._unreleased(own) is not None:
                own.issue(DeviceStreamOp(self._release_flag.set, scope=self._issuing_release))

    def wait(self, epoch: int, timeout: float) -> None:
        """Block until the stream has released."""
        with self._changed:
            self._check_epoch(epoch)
            if self._state is _DeviceLockState.WRITES:
                raise LockMisuse("the mover waits for slots that it owns")
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
                raise LockMisuse(f"the mover signals out of turn: {self._state.value}")
            self._state = _DeviceLockState.FULL
            self._deliver_signals()

    def poison(self) -> None:
        """Release every waiter of this epoch."""
        with self._changed:
            self._poisoned = True
            self._deliver_signals()
            self._watchdog.add(self)

    def check(self) -> None:
        """Raise `LockPoisoned` if this epoch was poisoned."""
        with self._changed:
            if self._poisoned:
                said = f"the stream lock was poisoned in epoch {self._epoch}"
                why = f": {self._failure}" if self._failure is not None else ""
                raise LockPoisoned(said + why) from self._failure

    def drain(self, timeout: float) -> int:
        """Begin the next epoch, once nothing of this one is on its way.

        What is launched meanwhile belongs to the old epoch and is waited for too: no verb of one
        epoch is passed in another (clause L3).
        """
        expiry = time.monotonic() + timeout
        while not self._next_epoch():
            left, event = (
                max(expiry - time.monotonic(), 0.0),
                next(iter(self._pending_events), None),
            )
            if event is not None:
                # A failed stream has nothing on its way any more.
                with suppress(StreamFailed):
                    event.synchronize(left)
            elif not poll(lambda: not self._issuing_count, left):
                raise StreamTimeout(f"a verb of epoch {self._epoch} is still being issued")
        return self._epoch

    def tick(self, now: float) -> bool:
        """For the watchdog: poison at the deadline, and let poisoned waiters go on (clause L6)."""
        with self._changed:
            self._collect_done()
            if not self._poisoned and self._overdue(now):
                self._poisoned = True
                late = f"a stream waited {self._deadline:g} s for the mover's signal"
                self._failure = StreamTimeout(late)
            if self._poisoned:
                self._deliver_signals()
            return any(not acquire.has_signal for acquire in self._acquires)

    def on_watchdog_failure(self, failure: BaseException) -> None:
        """The watchdog could not look: void, with that cause."""
        with self._changed:
            self._failure = failure
            self._poisoned = True

    @contextmanager
    def _issuing(self) -> Iterator[None]:
        """While a verb is given to the device: no epoch ends meanwhile.

        Without the mutex: a launch may stand in the driver, behind a queue that is full, and the
        signal, the poison and the watchdog must come through to what it stands behind.
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
        """Around the wait of an acquire, or around a replay in which it is."""
        acquire = _PendingAcquire(flag, stream, DeviceEvent(), DeviceEvent())
        with self._issuing():
            with self._changed:
                earlier = [s for s in self._acquires if s.flag is flag and s.stream is not stream]
                self._acquires.append(acquire)
            try:
                for other in earlier:
                    stream.wait(other.after_wait)  # else both would go on with one signal
                stream.record(acquire.before_wait)
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
                self._watchdog.add(self)

    def _cancel_acquire(self, acquire: _PendingAcquire) -> None:
        """Nobody waits there: the next one gets its signal, and its word is nobody's any more."""
        with self._changed:
            self._acquires.remove(acquire)
            self._borrowed_flags.discard(acquire.flag)
            if acquire.has_signal and not self._poisoned:
                self._state = _DeviceLockState.FULL
                self._deliver_signals()

    @contextmanager
    def _issuing_release(self, stream: Stream) -> Iterator[None]:
        """Around the setting of the empty word, or around a replay in which it is."""
        with self._issuing():
            with self._changed:
                acquire, left = self._unreleased(stream), DeviceEvent()
                if acquire is None:
                    raise LockMisuse("a replayed release has no acquire to follow")
                acquire.release_issued = True
            try:
                yield
                stream.record(left)
            except BaseException:
                acquire.release_issued = False
                raise
            with self._changed:
                self._pending_events.append(left)

    def _unreleased(self, stream: Stream) -> _PendingAcquire | None:
        """The acquire that a release on that stream belongs to: its own stream's come first."""
        with self._changed:
            unreleased = [acquire for acquire in self._acquires if not acquire.release_issued]
        own = [acquire for acquire in unreleased if acquire.stream is stream]
        return next(iter(own or unreleased), None)

    def _deliver_signals(self) -> None:
        """Give the signal to the first acquire that has none; a poison gives all of them one.

        A word that several replays wait for is given again only when the earlier one has taken it.
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
        """Whether an earlier acquire was given the same word and may not have taken it."""
        earlier = self._acquires[: self._acquires.index(acquire)]
        return any(
            s.flag is acquire.flag and not (s.has_signal and s.after_wait.query()) for s in earlier
        )

    def _overdue(self, now: float) -> bool:
        """Whether a stream has stood at an acquire for the deadline.

        Of each stream only the first acquire without a signal is reached: the others stand behind.
        """
        first: dict[Stream, _PendingAcquire] = {}
        for acquire in self._acquires:
            if not acquire.has_signal:
                first.setdefault(acquire.stream, acquire)
        for acquire in first.values():
            if acquire.waiting_since is None and acquire.before_wait.query():
                acquire.waiting_since = now
        stood = [
            now - acquire.waiting_since
            for acquire in first.values()
            if acquire.waiting_since is not None
        ]
        return max(stood, default=0.0) > self._deadline

    def _collect_done(self) -> None:
        """Forget what has passed; its words can be lent again."""
        self._pending_events = [event for event in self._pending_events if not event.query()]
        remaining: list[_PendingAcquire] = []
        for acquire in self._acquires:
            if acquire.release_issued and acquire.has_signal and acquire.after_wait.query():
                self._return_flag(acquire)
            else:
                remaining.append(acquire)
        self._acquires = remaining

    def _next_epoch(self) -> bool:
        """Begin it, unless a verb is being issued or has not been passed."""
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
        """The word is free again, unless a graph keeps it or the vendor has no more use for it."""
        if acquire.flag in self._borrowed_flags:
            self._borrowed_flags.remove(acquire.flag)
            if acquire.flag.reusable:
                self._free_flags.append(acquire.flag)

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise StaleEpoch(f"a mover of epoch {epoch} in epoch {self._epoch}")
        self.check()
