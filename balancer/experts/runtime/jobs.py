"""Jobs of the engine, and what they wait for.

A job is a generator. It yields what it waits for, a `WaitFor`, is sent what came, and returns its
result; what a wait raises is raised at its `yield`. A worker thread carries a job out by blocking
on every wait; a test carries it out step by step, in an order that it chooses.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import BallotIncomplete, ControlPlaneLost, StreamTimeout
from equipoise.hal.lock import StreamLock
from equipoise.hal.stream import Event, Stream
from equipoise.hal.work import Work

T_co = TypeVar("T_co", covariant=True)


class WaitFor(Protocol[T_co]):
    """Something that comes."""

    def ready(self) -> bool:
        """Whether it has come, or has failed; never blocks."""
        ...

    def wait(self, timeout: float) -> T_co:
        """Block until it has come, at most `timeout` seconds; raises what it failed with."""
        ...


@dataclass(frozen=True)
class WorkDone:
    """An operation of a communicator has ended; its own deadline bounds it as well."""

    work: Work

    def ready(self) -> bool:
        """Whether it has."""
        return self.work.done()

    def wait(self, timeout: float) -> None:
        """Raises as `Work.result` does."""
        self.work.result(timeout)


@dataclass(frozen=True)
class EventDone:
    """A stream has come to where an event was recorded."""

    event: Event

    def ready(self) -> bool:
        """Whether it has."""
        return self.event.query()

    def wait(self, timeout: float) -> None:
        """Raises as `Event.synchronize` does."""
        self.event.synchronize(timeout)


def stream_idle(accelerator: Accelerator, stream: Stream) -> EventDone:
    """Everything that was launched on `stream` so far has run."""
    event = accelerator.event()
    stream.record(event)
    return EventDone(event)


@dataclass(frozen=True)
class BallotsReady:
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
        except ControlPlaneLost:
            return True
        return True

    def wait(self, timeout: float) -> tuple[bytes, ...]:
        """The ballots, in the order of the ranks. Raises as `ControlPlane.collect` does."""
        return self.control.collect(self.question, timeout, self.ranks)


class LockReleased:
    """The stream has released a lock: the slots behind it are the mover's.

    Args:
        lock: whose stream; the release is due in the epoch that it is in now.
    """

    def __init__(self, lock: StreamLock) -> None:
        self._lock = lock
        self.epoch = lock.epoch
        self._waited = False

    def ready(self) -> bool:
        """Whether it has. The lock counts a successful look as the wait, so it is kept."""
        try:
            self.wait(0.0)
        except StreamTimeout:
            return False
        return True

    def wait(self, timeout: float) -> None:
        """Raises as `StreamLock.wait` does."""
        if not self._waited:
            self._lock.wait(self.epoch, timeout)
            self._waited = True


T = TypeVar("T")
Job: TypeAlias = Generator[WaitFor[Any], Any, T]


class JobHandle(Protocol[T_co]):
    """A job that was started."""

    def done(self) -> bool:
        """Whether it has ended, by whatever end."""
        ...

    def result(self, timeout: float | None = None) -> T_co:
        """What it returned; raises what it raised, and `TimeoutError` after `timeout` seconds."""
        ...

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What it raised, if anything."""
        ...


def run_blocking(job: Job[T], timeout: float, check: Callable[[], object] = lambda: None) -> T:
    """Carry `job` out on the calling thread, and return its result.

    Args:
        job: to be carried out.
        timeout: seconds that each of its waits may last.
        check: called before each wait; what it raises is raised in the job.

    Raises:
        Exception: what the job raises.
    """
    go_on: Callable[[], WaitFor[Any]] = partial(next, job)
    while True:
        try:
            wait = go_on()
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            check()
            go_on = partial(job.send, wait.wait(timeout))
        except Exception as error:
            go_on = partial(job.throw, error)


def immediate(call: Callable[[], T]) -> Job[T]:
    """A job that waits for nothing."""
    yield from ()
    return call()


@dataclass(frozen=True)
class JobDone(Generic[T_co]):
    """A task has ended: what a boundary waits for when it comes before what it needs."""

    job: JobHandle[T_co]

    def ready(self) -> bool:
        """Whether it has."""
        return self.job.done()

    def wait(self, timeout: float) -> T_co:
        """Its result; raises as `JobHandle.result` does."""
        return self.job.result(timeout)
