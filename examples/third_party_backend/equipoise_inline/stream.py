"""A stream that is the calling thread: a launch has run when it returns."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from equipoise.hal import Event, Role
from equipoise.hal.errors import EventNotRecorded, StreamFailed


class InlineEvent:
    """A point that is reached as soon as it is recorded, unless its stream has failed."""

    def __init__(self) -> None:
        self.recorded = False
        self.failure: BaseException | None = None

    def query(self) -> bool:
        """Whether it was recorded."""
        return self.recorded

    def synchronize(self, timeout: float) -> None:
        """Nothing to wait for."""
        if not self.recorded:
            raise EventNotRecorded("nothing was recorded into this event")
        if self.failure is not None:
            raise StreamFailed(f"the recording stream failed: {self.failure}") from self.failure


class InlineStream:
    """Runs programs in the caller's thread, one after another; fails for good with the first."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._failure: BaseException | None = None
        self._closed = False

    @property
    def role(self) -> Role:
        """What the stream is for."""
        return self._role

    @contextmanager
    def current(self) -> Iterator[None]:
        """Nothing here is ordered by the current stream: what was launched has run."""
        yield

    def launch(self, program: Callable[[], object]) -> None:
        """Run `program` now; an error fails the stream, and the next call raises."""
        self._check()
        try:
            program()
        except Exception as failure:
            self._failure = failure

    def record(self, event: Event) -> None:
        """The point is reached."""
        mine = _own(event)
        mine.recorded, mine.failure = True, self._failure
        self._check()

    def wait(self, event: Event) -> None:
        """Either the event's point is reached already, or its stream has failed."""
        self._check()
        try:
            _own(event).synchronize(0.0)
        except StreamFailed as failure:
            self._failure = failure.__cause__

    def synchronize(self, timeout: float) -> None:
        """Nothing to wait for."""
        self._check()

    def close(self) -> None:
        """Refuse what comes from now on."""
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise StreamFailed(f"stream {self._role} was closed")
        if self._failure is not None:
            raise StreamFailed(f"stream {self._role} failed: {self._failure}") from self._failure


def _own(event: Event) -> InlineEvent:
    if not isinstance(event, InlineEvent):
        raise TypeError(f"an event of another backend: {event!r}")
    return event
