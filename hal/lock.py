"""Hand-over between a stream and a mover that writes slots from the host side."""

from typing import Protocol, runtime_checkable

from equipoise.hal.stream import Stream


@runtime_checkable
class StreamLock(Protocol):
    """Two self-resetting binary words: *full* (the slots may be read), *empty* (be written).

    The mover owns the slots when an epoch begins. It writes and signals; one acquire goes on; the
    stream reads and releases; the mover's wait returns; and so on, strictly in turn:

        mover:   write, signal(epoch) ........ wait(epoch), write, signal(epoch) ...
        stream:  acquire (waits for full) read release (sets empty) ... acquire ...

    The stream's side carries no count, so a captured graph may replay it (clause L2). The host's
    side names the epoch it belongs to, so that a mover which comes late from an epoch that was
    given up cannot release a waiter of the next one (clause L3).
    """

    @property
    def epoch(self) -> int:
        """The epoch that runs; grows by one at each `drain`."""
        ...

    def acquire(self, stream: Stream) -> None:
        """Stream-ordered: what is launched from now on runs after one signal of its own.

        The signal may come before or after (L1). A stream that has waited for the lock's deadline
        is released by a poison (L6).
        """
        ...

    def release(self, stream: Stream) -> None:
        """Stream-ordered: the mover may write once everything launched so far has run (O5)."""
        ...

    def wait(self, epoch: int, timeout: float) -> None:
        """Block the host until the stream has released.

        Raises:
            StaleEpoch: `epoch` is over; nothing has happened.
            LockMisuse: the mover owns the slots already.
            LockPoisoned: the epoch was poisoned.
            StreamTimeout: no release within `timeout` seconds; waiting again is allowed.
        """
        ...

    def signal(self, epoch: int) -> None:
        """Let exactly one `acquire` go on, which sees everything written before (L7).

        Raises:
            StaleEpoch: `epoch` is over; nothing has happened.
            LockMisuse: the mover does not own the slots: it has signalled and not waited since.
            LockPoisoned: the epoch was poisoned.
        """
        ...

    def poison(self) -> None:
        """Release every waiter of this epoch, those to come included; what they read is void."""
        ...

    def check(self) -> None:
        """Raise `LockPoisoned` if this epoch was poisoned: the step's output is to be discarded."""
        ...

    def drain(self, timeout: float) -> int:
        """End the epoch and begin the next, whose number is returned.

        Waits until every acquire and release launched so far has passed, then empties both words.

        Raises:
            StreamTimeout: one has not within `timeout` seconds; the epoch goes on.
        """
        ...
