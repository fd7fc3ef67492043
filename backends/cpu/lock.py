"""The stream lock as a condition variable."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum

from equipoise.backends.cpu.stream import CpuEvent, CpuStream, CpuStreamOp, own_stream
from equipoise.hal.errors import (
    LockMisuse,
    LockPoisoned,
    StaleEpoch,
    StreamFailed,
    StreamTimeout,
)
from equipoise.hal.stream import Stream


class _CpuLockState(Enum):
    """Who owns the slots. The two flags of the protocol are two of the four states (L2)."""

    WRITES = "the writer owns the slots"
    FULL = "the slots may be read"
    READS = "the stream reads the slots"
    EMPTY = "the slots may be written"


class CpuStreamLock:
    """Hands slots over between a stream's worker thread and the writer's thread.

    The worker itself waits in `acquire` and needs no watchdog: after `deadline` seconds without a
    signal it poisons the lock and continues (clause L6).
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._changed = threading.Condition()
        self._state = _CpuLockState.WRITES
        self._epoch = 0
        self._poisoned = False
        self._timed_out = False
        self._pending_events: list[CpuEvent] = []

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._epoch

    def acquire(self, stream: Stream) -> None:
        """Make the worker wait for a signal of its own."""
        own_stream(stream).issue(CpuStreamOp(lambda on: self._launch(self._on_acquire, on)))

    def release(self, stream: Stream) -> None:
        """Let the writer write, as soon as the worker gets here."""
        own_stream(stream).issue(CpuStreamOp(lambda on: self._launch(self._on_release, on)))

    def wait(self, epoch: int, timeout: float) -> None:
        """Block until the stream has released."""
        with self._changed:
            self._check_epoch(epoch)
            if self._state is _CpuLockState.WRITES:
                raise LockMisuse("the writer waits for slots that it owns")
            self._changed.wait_for(lambda: self._is_released(epoch), timeout)
            self._check_epoch(epoch)
            if self._state is not _CpuLockState.EMPTY:
                raise StreamTimeout(f"no release within {timeout:g} s: {self._state.value}")
            self._state = _CpuLockState.WRITES

    def signal(self, epoch: int) -> None:
        """Let one `acquire` go on."""
        with self._changed:
            self._check_epoch(epoch)
            if self._state is not _CpuLockState.WRITES:
                raise LockMisuse(f"the writer signals out of turn: {self._state.value}")
            self._state = _CpuLockState.FULL
            self._changed.notify_all()

    def poison(self) -> None:
        """Release every waiter of this epoch."""
        with self._changed:
            self._poisoned = True
            self._changed.notify_all()

    def check(self) -> None:
        """Raise `LockPoisoned` if this epoch was poisoned."""
        with self._changed:
            if self._poisoned:
                message = f"the stream lock was poisoned in epoch {self._epoch}"
                overdue = f": a stream waited {self._deadline:g} s for the writer's signal"
                raise LockPoisoned(message + (overdue if self._timed_out else ""))

    def drain(self, timeout: float) -> int:
        """Begin the next epoch, after everything of this one has run.

        What is launched in the meantime belongs to the old epoch and is waited for too: no acquire
        or release of one epoch takes effect in another (clause L3).
        """
        expiry = time.monotonic() + timeout
        while (event := self._next_epoch()) is not None:
            # A failed stream runs nothing any more, so there is nothing to wait for.
            with suppress(StreamFailed):
                event.synchronize(max(expiry - time.monotonic(), 0.0))
        return self._epoch

    def _next_epoch(self) -> CpuEvent | None:
        """The event of an operation that has not run yet. If there is none, begin the next epoch
        and return None."""
        with self._changed:
            passing = next((event for event in self._pending_events if not event.query()), None)
            if passing is None:
                self._pending_events.clear()
                self._state, self._poisoned, self._timed_out = _CpuLockState.WRITES, False, False
                self._epoch += 1
                self._changed.notify_all()
            return passing

    def _launch(self, program: Callable[[], None], stream: CpuStream) -> None:
        end_event = CpuEvent()
        with self._changed:  # so that no drain ends between the launch and its registration
            stream.launch(program)
            stream.record(end_event)
            self._pending_events = [event for event in self._pending_events if not event.query()]
            self._pending_events.append(end_event)

    def _on_acquire(self) -> None:
        """Runs on the worker: wait for the signal."""
        with self._changed:
            free = self._changed.wait_for(
                lambda: self._poisoned or self._state is _CpuLockState.FULL, self._deadline
            )
            if not free:
                self._timed_out = True
                self.poison()
            if not self._poisoned:
                self._state = _CpuLockState.READS

    def _on_release(self) -> None:
        """Runs on the worker: give the slots to the writer. Does nothing without an earlier
        `acquire`."""
        with self._changed:
            if self._state is _CpuLockState.READS:
                self._state = _CpuLockState.EMPTY
                self._changed.notify_all()

    def _is_released(self, epoch: int) -> bool:
        return self._state is _CpuLockState.EMPTY or self._poisoned or self._epoch != epoch

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise StaleEpoch(f"a writer of epoch {epoch} in epoch {self._epoch}")
        self.check()
