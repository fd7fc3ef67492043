"""What a job of the engine waits for: each can be looked at, and each can be taken by blocking.

Jobs say what they wait for instead of waiting (`balancer/experts/jobs.py`). So a thread may block
on it, and a test may decide when it has come.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from equipoise.hal.control import ControlPlane
from equipoise.hal.errors import BallotIncomplete
from equipoise.hal.stream import Event
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


@dataclass(frozen=True)
class Gathered:
    """Every rank has cast its ballot on a question."""

    control: ControlPlane
    question: str

    def ready(self) -> bool:
        """Whether they have; asks the store."""
        try:
            self.control.collect(self.question, 0.0)
        except BallotIncomplete:
            return False
        return True

    def take(self, timeout: float) -> tuple[bytes, ...]:
        """The ballots in rank order. Raises as `ControlPlane.collect` does."""
        return self.control.collect(self.question, timeout)
