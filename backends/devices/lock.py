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

    def break_down(self, failure: BaseException) -> None:
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

    def look(self) -> None:
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
        self._device.settle()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._watched)
                if self._stopped:
                    return
            with NATIVE_CALL_GUARD:
                self.look()
            time.sleep(POLL_INTERVAL)

    def _tick(self, lock: WatchedLock) -> bool:
        try:
            return lock.tick(time.monotonic())
        except BaseException as failure:  # this thread must look after the others still
            lock.break_down(failure)
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
        word: that it waits for.
        stream: that it waits on.
        reached: recorded before the wait, or before the graph that the wait is a part of.
        passed: recorded behind it.
        fed: whether its signal was given.
        released: whether its release was issued.
        since: when its wait was first seen to stand.
    """

    word: AcquireFlag
    stream: Stream
    reached: DeviceEvent
    passed: DeviceEvent
    fed: bool = False
    released: bool = False
    since: float | None = None


class DeviceStreamLock:
    """Hand-over between the device's streams and a mover's thread.

    The host knows every acquire that is under way, in the order of issue, and gives each signal to
    the first that has none; a word of its own lets exactly that one go on. Releases are matched to
    acquires when they are issued, so that one without an acquire gives nothing. A replay issues the
    bookkeeping of its acquires and releases anew; their words are part of the captured graph.
    """

    def __init__(self, words: LockFlags, deadline: float, watch: LockWatchdog) -> None:
        self._words = words
        self._deadline = deadline
        self._watch = watch
        self._changed = threading.RLock()
        self._turn = _DeviceLockState.WRITES
        self._epoch = 0
        self._poisoned = False
        self._empty = words.empty()
        self._failure: BaseException | None = None
        self._spare: list[AcquireFlag] = []
        self._lent: set[AcquireFlag] = set()
        self._sections: list[_PendingAcquire] = []
        self._passing: list[DeviceEvent] = []
        self._under_way = 0

    @property
    def epoch(self) -> int:
        """The epoch that runs."""
        return self._epoch

    def acquire(self, stream: Stream) -> None:
        """Make the stream wait for a signal of its own."""
        own = own_stream(stream)
        word = self._words.full() if own.capturing else self._lend()
        try:
            own.issue(DeviceStreamOp(word.wait, around=lambda on: self._entering(word, on)))
        except BaseException:
            with self._changed:
                self._lent.discard(word)  # refused before anybody waited there
            raise

    def release(self, stream: Stream) -> None:
        """Let the mover write, once the stream has come here.

        A replayed release without an acquire to follow raises `LockMisuse`: it cannot be left out.
        """
        own = own_stream(stream)
        with own.gate:
            if own.capturing or self._unreleased(own) is not None:
                own.issue(DeviceStreamOp(self._empty.set, around=self._leaving))

    def wait(self, epoch: int, timeout: float) -> None:
        """Block until the stream has released."""
        with self._changed:
            self._admit(epoch)
            if self._turn is _DeviceLockState.WRITES:
                raise LockMisuse("the mover waits for slots that it owns")
        poll(lambda: self._poisoned or self._epoch != epoch or self._empty.is_set(), timeout)
        with self._changed:
            self._admit(epoch)
            if not self._empty.is_set():
                raise StreamTimeout(f"no release within {timeout:g} s: {self._turn.value}")
            self._turn = _DeviceLockState.WRITES
            self._empty.clear()

    def signal(self, epoch: int) -> None:
        """Let one `acquire` go on."""
        with self._changed:
            self._admit(epoch)
            if self._turn is not _DeviceLockState.WRITES:
                raise LockMisuse(f"the mover signals out of turn: {self._turn.value}")
            self._turn = _DeviceLockState.FULL
            self._feed()

    def poison(self) -> None:
        """Release every waiter of this epoch."""
        with self._changed:
            self._poisoned = True
            self._feed()
            self._watch.add(self)

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
            left, passing = max(expiry - time.monotonic(), 0.0), next(iter(self._passing), None)
            if passing is not None:
                # A failed stream has nothing on its way any more.
                with suppress(StreamFailed):
                    passing.synchronize(left)
            elif not poll(lambda: not self._under_way, left):
                raise StreamTimeout(f"a verb of epoch {self._epoch} is still being issued")
        return self._epoch

    def tick(self, now: float) -> bool:
        """For the watchdog: poison at the deadline, and let poisoned waiters go on (clause L6)."""
        with self._changed:
            self._tidy()
            if not self._poisoned and self._overdue(now):
                self._poisoned = True
                late = f"a stream waited {self._deadline:g} s for the mover's signal"
                self._failure = StreamTimeout(late)
            if self._poisoned:
                self._feed()
            return any(not section.fed for section in self._sections)

    def break_down(self, failure: BaseException) -> None:
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
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1

    @contextmanager
    def _entering(self, word: AcquireFlag, on: Stream) -> Iterator[None]:
        """Around the wait of an acquire, or around a replay in which it is."""
        section = _PendingAcquire(word, on, DeviceEvent(), DeviceEvent())
        with self._issuing():
            with self._changed:
                earlier = [s for s in self._sections if s.word is word and s.stream is not on]
                self._sections.append(section)
            try:
                for other in earlier:
                    on.wait(other.passed)  # else both would go on with one signal
                on.record(section.reached)
                with self._changed:
                    self._feed()
                    self._watch.add(self)
                yield
                on.record(section.passed)
            except BaseException:
                self._withdraw(section)
                raise
            with self._changed:
                self._passing.append(section.passed)
                self._watch.add(self)

    def _withdraw(self, section: _PendingAcquire) -> None:
        """Nobody waits there: the next one gets its signal, and its word is nobody's any more."""
        with self._changed:
            self._sections.remove(section)
            self._lent.discard(section.word)
            if section.fed and not self._poisoned:
                self._turn = _DeviceLockState.FULL
                self._feed()

    @contextmanager
    def _leaving(self, on: Stream) -> Iterator[None]:
        """Around the setting of the empty word, or around a replay in which it is."""
        with self._issuing():
            with self._changed:
                section, left = self._unreleased(on), DeviceEvent()
                if section is None:
                    raise LockMisuse("a replayed release has no acquire to follow")
                section.released = True
            try:
                yield
                on.record(left)
            except BaseException:
                section.released = False
                raise
            with self._changed:
                self._passing.append(left)

    def _unreleased(self, on: Stream) -> _PendingAcquire | None:
        """The acquire that a release on that stream belongs to: its own stream's come first."""
        with self._changed:
            kept = [section for section in self._sections if not section.released]
        mine = [section for section in kept if section.stream is on]
        return next(iter(mine or kept), None)

    def _feed(self) -> None:
        """Give the signal to the first acquire that has none; a poison gives all of them one.

        A word that several replays wait for is given again only when the earlier one has taken it.
        """
        for section in self._sections:
            if section.fed or (self._poisoned and self._busy(section)):
                continue
            if not self._poisoned and self._turn is not _DeviceLockState.FULL:
                return
            section.fed = True
            self._turn = _DeviceLockState.READS
            section.word.give()

    def _busy(self, section: _PendingAcquire) -> bool:
        """Whether an earlier acquire was given the same word and may not have taken it."""
        earlier = self._sections[: self._sections.index(section)]
        return any(s.word is section.word and not (s.fed and s.passed.query()) for s in earlier)

    def _overdue(self, now: float) -> bool:
        """Whether a stream has stood at an acquire for the deadline.

        Of each stream only the first acquire without a signal is reached: the others stand behind.
        """
        first: dict[Stream, _PendingAcquire] = {}
        for section in self._sections:
            if not section.fed:
                first.setdefault(section.stream, section)
        for section in first.values():
            if section.since is None and section.reached.query():
                section.since = now
        stood = [now - section.since for section in first.values() if section.since is not None]
        return max(stood, default=0.0) > self._deadline

    def _tidy(self) -> None:
        """Forget what has passed; its words can be lent again."""
        self._passing = [event for event in self._passing if not event.query()]
        kept: list[_PendingAcquire] = []
        for section in self._sections:
            if section.released and section.fed and section.passed.query():
                self._take_back(section)
            else:
                kept.append(section)
        self._sections = kept

    def _next_epoch(self) -> bool:
        """Begin it, unless a verb is being issued or has not been passed."""
        with self._changed:
            self._tidy()
            if self._poisoned:
                self._feed()
            if self._under_way or self._passing:
                return False
            for section in self._sections:
                self._take_back(section)
            self._sections = []
            self._turn, self._poisoned, self._failure = _DeviceLockState.WRITES, False, None
            self._empty.clear()
            self._epoch += 1
            return True

    def _lend(self) -> AcquireFlag:
        with self._changed:
            if not self._spare:
                self._tidy()
            word = self._spare.pop() if self._spare else self._words.full()
            self._lent.add(word)
            return word

    def _take_back(self, section: _PendingAcquire) -> None:
        """The word is free again, unless a graph keeps it or the vendor has no more use for it."""
        if section.word in self._lent:
            self._lent.remove(section.word)
            if section.word.lendable:
                self._spare.append(section.word)

    def _admit(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise StaleEpoch(f"a mover of epoch {epoch} in epoch {self._epoch}")
        self.check()
