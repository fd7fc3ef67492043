"""Jobs of the engine, and the conditions that they wait for.

A job is a generator. It yields a condition, a `WaitFor`, is sent the result of the wait, and
returns its own result; an error of the wait is raised at its `yield`. A worker thread runs a job by
blocking on every wait; a test runs it step by step, in an order that it chooses.
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
    """A condition that a job waits for."""

    def ready(self) -> bool:
        """Returns whether it is met or has failed; never blocks."""
        ...

    def wait(self, timeout: float) -> T_co:
        """Blocks until it is met, at most `timeout` seconds; raises the error if it failed."""
        ...


@dataclass(frozen=True)
class WorkDone:
    """An operation of a communicator has ended; its own timeout bounds it as well."""

    work: Work

    def ready(self) -> bool:
        """Returns whether it has."""
        return self.work.done()

    def wait(self, timeout: float) -> None:
        """Raises as `Work.result` does."""
        self.work.result(timeout)


@dataclass(frozen=True)
class EventDone:
    """A stream has reached a recorded event."""

    event: Event

    def ready(self) -> bool:
        """Returns whether it has."""
        return self.event.query()

    def wait(self, timeout: float) -> None:
        """Raises as `Event.synchronize` does."""
        self.event.synchronize(timeout)


def stream_idle(accelerator: Accelerator, stream: Stream) -> EventDone:
    """Returns the condition that everything launched on `stream` so far has run."""
    event = accelerator.event()
    stream.record(event)
    return EventDone(event)


@dataclass(frozen=True)
class BallotsReady:
    """All of these ranks have cast their ballots under a key."""

    control: ControlPlane
    key: str
    ranks: tuple[int, ...]

    def ready(self) -> bool:
        """Returns whether they have; reads the store."""
        try:
            self.control.collect(self.key, 0.0, self.ranks)
        except BallotIncomplete:
            return False
        except ControlPlaneLost:
            return True
        return True

    def wait(self, timeout: float) -> tuple[bytes, ...]:
        """Returns the ballots, in the order of the ranks. Raises as `ControlPlane.collect` does."""
        return self.control.collect(self.key, timeout, self.ranks)


class LockReleased:
    """The stream has released a lock: the transfer worker may write its slots.

    Args:
        lock: the lock; the release is expected in its current epoch.
    """

    def __init__(self, lock: StreamLock) -> None:
        self._lock = lock
        self.epoch = lock.epoch
        self._waited = False

    def ready(self) -> bool:
        """Returns whether it has. A successful check is the wait for the lock, so it is kept."""
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
    """A handle to a job that was started."""

    def done(self) -> bool:
        """Returns whether it has ended, with a result or an error."""
        ...

    def result(self, timeout: float | None = None) -> T_co:
        """Returns its result; raises its error, and `TimeoutError` after `timeout` seconds."""
        ...

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns its error, if any."""
        ...


def run_blocking(job: Job[T], timeout: float, check: Callable[[], object] = lambda: None) -> T:
    """Runs `job` on the calling thread, and returns its result.

    Args:
        job: the job.
        timeout: seconds that each of its waits may last.
        check: called before each wait; an error is raised in the job.

    Raises:
        Exception: the error of the job.
    """
    resume: Callable[[], WaitFor[Any]] = partial(next, job)
    while True:
        try:
            wait = resume()
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            check()
            resume = partial(job.send, wait.wait(timeout))
        except Exception as error:
            resume = partial(job.throw, error)


def immediate(call: Callable[[], T]) -> Job[T]:
    """Returns a job that calls `call` and waits for nothing."""
    yield from ()
    return call()


@dataclass(frozen=True)
class JobDone(Generic[T_co]):
    """A job has ended: a boundary waits for it if it needs the result now."""

    job: JobHandle[T_co]

    def ready(self) -> bool:
        """Returns whether it has."""
        return self.job.done()

    def wait(self, timeout: float) -> T_co:
        """Returns its result; raises as `JobHandle.result` does."""
        return self.job.result(timeout)
