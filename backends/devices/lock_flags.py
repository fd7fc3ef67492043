"""The two kinds of words that a stream lock is made of, as devices and hosts know them."""

from typing import Any, Protocol


class AcquireFlag(Protocol):
    """One waiting acquire at a time: its stream waits until the word is given, and takes it.

    Waiting and taking are two steps, so that two streams that wait for one word may both go on:
    every acquire under way has a word to itself (clause L1). One that was captured keeps its word
    for all replays.
    """

    def wait(self, stream: Any) -> None:
        """Enqueue the wait on a vendor's stream, which may be capturing."""
        ...

    def signal(self) -> None:
        """Release the one that waits, or will. The word must have been taken since the last."""
        ...

    @property
    def reusable(self) -> bool:
        """Whether another acquire may wait for it, once the one before has passed."""
        ...


class ReleaseFlag(Protocol):
    """A word that a stream sets, for the host to read."""

    def set(self, stream: Any) -> None:
        """Enqueue the setting on a vendor's stream, which is current and may be capturing."""
        ...

    def is_set(self) -> bool:
        """Whether a stream has come there."""
        ...

    def clear(self) -> None:
        """Back to unset."""
        ...


class LockFlags(Protocol):
    """Makes them, for one device."""

    def acquire_flag(self) -> AcquireFlag:
        """A word that is not given."""
        ...

    def release_flag(self) -> ReleaseFlag:
        """A word that is not set."""
        ...
