"""What a job of the engine waits for: each can be looked at, and each can be taken by blocking.

Jobs say what they wait for instead of waiting (`balancer/experts/jobs.py`). So a thread may block
on it, and a test may decide when it has come.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.control import ControlPlane
from equipoise.hal.errors import BallotIncomplete, ControlLost, StreamTimeout
from equipoise.hal.lock import StreamLock
from equipoise.hal.stream import Event, Stream
from equipoise.hal.work import Work

T_co = TypeVar("T_co", covariant=True)


class Wait(Protocol[T_co]):
    """Something that comes."""

    def ready(self) -> bool:
        """Whether it has come, or has failed; never blocks."""
        ...

    def take(self, timeout: float) -> T_co:
        """Block until it has come, at most `timeout` seconds; raises what it failed with."""
        ...


@dataclass(frozen=True)
class Ended:
    """An operation of a communicator has ended; its own deadline bounds it as well."""

    work: Work

    def ready(self) -> bool:
        """Whether it has."""
        return self.work.done()

    def take(self, timeout: float) -> None:
        """Raises as `Work.result` does."""
        self.work.result(timeout)


@dataclass(frozen=True)
class Reached:
    """A stream has come to where an event was recorded."""

    event: Event

    def ready(self) -> bool:
        """Whether it has."""
        return self.event.query()

    def take(self, timeout: float) -> None:
        """Raises as `Event.synchronize` does."""
        self.event.synchronize(timeout)


def all_of(accelerator: Accelerator, stream: Stream) -> Reached:
    """Everything that was launched on `stream` so far has run."""
    event = accelerator.event()
    stream.record(event)
    return Reached(event)


@dataclass(frozen=True)
class Gathered:
    """Every one of these ranks has cast its ballot on a question."""

    control: ControlPlane
    question: str
    ranks: tuple[int, ...]

    def ready(self) -> bool:
        """Whether they have; asks the store."""
        try:
            self.control.collect(self.question, 0.0, self.ranks)
        except BallotIncomplete:
            return False
        except ControlLost:
            return True
        return True

    def take(self, timeout: float) -> tuple[bytes, ...]:
        """The ballots, in the order of the ranks. Raises as `ControlPlane.collect` does."""
        return self.control.collect(self.question, timeout, self.ranks)


class Released:
    """The stream has released a lock: the slots behind it are the mover's.

    Args:
        lock: whose stream; the release is due in the epoch that it is in now.
    """

    def __init__(self, lock: StreamLock) -> None:
        self._lock = lock
        self.epoch = lock.epoch
        self._taken = False

    def ready(self) -> bool:
        """Whether it has. The lock counts a successful look as the wait, so it is kept."""
        try:
            self.take(0.0)
        except StreamTimeout:
            return False
        return True

    def take(self, timeout: float) -> None:
        """Raises as `StreamLock.wait` does."""
        if not self._taken:
            self._lock.wait(self.epoch, timeout)
            self._taken = True
