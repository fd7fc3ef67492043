"""The stream lock: hand-over of slots between a stream and a writer on the host."""

from typing import Protocol, runtime_checkable

from equipoise.hal.stream import Stream


@runtime_checkable
class StreamLock(Protocol):
    """Two self-resetting binary words: *full* (the slots may be read), *empty* (be written).

    The writer owns the slots when an epoch begins. It writes and signals; one acquire proceeds; the
    stream reads and releases; the writer's wait returns; and so on, strictly alternating:

        writer:  write, signal(epoch) ........ wait(epoch), write, signal(epoch) ...
        stream:  acquire (waits for full) read release (sets empty) ... acquire ...

    The stream's side carries no count, so a captured graph may replay it (clause L2). The host's
    side passes its epoch, so that a late writer of an abandoned epoch cannot release a waiter of
    the next one (clause L3).
    """

    @property
    def epoch(self) -> int:
        """Number of the current epoch; each `drain` increments it."""
        ...

    def acquire(self, stream: Stream) -> None:
        """Make what is launched on `stream` from now on run after one signal of its own.

        The signal may come before or after the call (L1). After the lock's deadline a poison
        releases a waiting stream (L6).
        """
        ...

    def release(self, stream: Stream) -> None:
        """Let the writer write once everything launched on `stream` so far has run (O5)."""
        ...

    def wait(self, epoch: int, timeout: float) -> None:
        """Block the host until the stream has released.

        Raises:
            StaleEpoch: `epoch` has ended; nothing has happened.
            LockMisuse: the writer owns the slots already.
            LockPoisoned: the epoch was poisoned.
            StreamTimeout: no release within `timeout` seconds; waiting again is allowed.
        """
        ...

    def signal(self, epoch: int) -> None:
        """Let exactly one `acquire` proceed; it sees everything written before (L7).

        Raises:
            StaleEpoch: `epoch` has ended; nothing has happened.
            LockMisuse: the writer does not own the slots: it has signalled and not waited since.
            LockPoisoned: the epoch was poisoned.
        """
        ...

    def poison(self) -> None:
        """Release every waiter of this epoch, future ones included; what they read is invalid."""
        ...

    def check(self) -> None:
        """Raise `LockPoisoned` if this epoch was poisoned: discard the output of the step."""
        ...

    def drain(self, timeout: float) -> int:
        """End the epoch, begin the next, and return its number.

        Waits until every acquire and release launched so far has passed, then empties both words. A
        release that `wait` has seen may not have passed yet: a device sets the word first.

        Raises:
            StreamTimeout: one has not within `timeout` seconds; the epoch continues.
        """
        ...
