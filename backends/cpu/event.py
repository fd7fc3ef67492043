"""Events as references to their latest mark."""

from dataclasses import dataclass, field

from equipoise.backends.cpu.latch import Latch
from equipoise.hal.errors import EventNotRecorded, StreamFailed, StreamTimeout
from equipoise.hal.stream import Event


@dataclass(eq=False)
class Mark:
    """One recording of an event: reached, or failed together with its stream."""

    reached: Latch = field(default_factory=Latch)
    failure: BaseException | None = None

    def fail(self, failure: BaseException) -> None:
        """The point will never be reached."""
        self.failure = failure
        self.reached.set()

    def wait(self, timeout: float, what: str) -> None:
        """Block until the point is reached. Raises `StreamTimeout`, `StreamFailed`."""
        if not self.reached.wait(timeout):
            raise StreamTimeout(f"{what} was not reached within {timeout:g} s")
        if self.failure is not None:
            raise StreamFailed(f"{what} failed: {self.failure}") from self.failure


class CpuEvent:
    """The latest recording; whoever waits keeps the recording it saw."""

    def __init__(self) -> None:
        self._mark: Mark | None = None

    def query(self) -> bool:
        """Whether the latest recording has been reached."""
        mark = self._mark
        return mark is not None and mark.reached.is_set()

    def synchronize(self, timeout: float) -> None:
        """Block until the latest recording is reached."""
        self.latest().wait(timeout, "the event")

    def latest(self) -> Mark:
        """The latest recording. Raises `EventNotRecorded`."""
        if self._mark is None:
            raise EventNotRecorded("nothing was ever recorded into this event")
        return self._mark

    def renew(self) -> Mark:
        """Start a new recording; earlier waiters keep the old one."""
        self._mark = Mark()
        return self._mark


def own_event(event: Event) -> CpuEvent:
    """`event` itself. Raises `TypeError` for one of another backend."""
    if not isinstance(event, CpuEvent):
        raise TypeError(f"an event of another backend: {event!r}")
    return event
