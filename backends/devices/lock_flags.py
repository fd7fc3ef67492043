"""The two kinds of flags that a stream lock is made of; each vendor implements them."""

from typing import Any, Protocol


class AcquireFlag(Protocol):
    """A flag that the host sets and one stream waits for and clears.

    Waiting and clearing are two steps on the device, so two streams that wait for one flag could
    both continue after one signal. Hence every acquire in progress has a flag to itself (clause
    L1). A captured acquire keeps its flag for all replays.
    """

    def wait(self, stream: Any) -> None:
        """Enqueue the wait and the clearing on a vendor's stream, which may be capturing."""
        ...

    def signal(self) -> None:
        """Set the flag, before or after the wait. It must have been cleared since the last time."""
        ...

    @property
    def reusable(self) -> bool:
        """Whether another acquire may use the flag after this one has passed."""
        ...


class ReleaseFlag(Protocol):
    """A flag that a stream sets and the host reads."""

    def set(self, stream: Any) -> None:
        """Enqueue the setting on a vendor's stream, which is current and may be capturing."""
        ...

    def is_set(self) -> bool:
        """Whether a stream has set it."""
        ...

    def clear(self) -> None:
        """Clear it, from the host."""
        ...


class LockFlags(Protocol):
    """Makes the flags of one device."""

    def acquire_flag(self) -> AcquireFlag:
        """A flag that is not set."""
        ...

    def release_flag(self) -> ReleaseFlag:
        """A flag that is not set."""
        ...
