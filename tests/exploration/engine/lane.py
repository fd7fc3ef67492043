"""Hosts and workers of an engine as lanes of a virtual world: one micro-step from wait to wait."""

from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Generic, TypeVar, cast

from equipoise.balancer.experts.runtime.jobs import BallotsReady, Job, WaitFor
from equipoise.balancer.experts.runtime.workers import WorkerClosed

T = TypeVar("T")


WAITING = frozenset({"transfer", "vote"})
"""Kinds whose jobs wait for something: they raise where they wait, not before they have begun."""


class Planted(Exception):
    """What a fault raises in a job."""


class Run:
    """A generator under way, and what it waits for."""

    __slots__ = ("_on", "job", "wait")

    def __init__(self, job: Generator[WaitFor[Any], Any, Any]) -> None:
        self.job = job
        self.wait: WaitFor[Any] | None = None
        self._on: Callable[[], WaitFor[Any]] = partial(next, job)

    def ready(self) -> bool:
        return self.wait is None or self.wait.ready()

    def step(self) -> None:
        """Go on to the next wait. Raises `StopIteration` at the end, or what the job raises."""
        if self.wait is None:
            self.wait = next(self.job)
            return
        try:
            came = self.wait.wait(0.0)
        except Exception as error:
            self.throw(error)
            return
        self.wait = self.job.send(came)

    def throw(self, error: Exception) -> None:
        self.wait = self.job.throw(error)


class LaneTask(Generic[T]):
    """A job that was started on a lane."""

    def __init__(self) -> None:
        self._ended = False
        self._value: T | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._ended

    def result(self, timeout: float | None = None) -> T:
        if not self._ended:
            raise TimeoutError("the job has not ended")
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._error

    def end(self, value: T) -> None:
        self._ended, self._value = True, value

    def fail(self, error: BaseException) -> None:
        self._ended, self._error = True, error


class LaneWorker:
    """Carries jobs out one after another; whoever drives the world says when.

    Attributes:
        ranks: whose it is.
        kind: what it does.
        poisoned: its next micro-step raises in the job, as a fault has it.
        hasty: the next ballots that are not all there time out at once.
        since: the micro-step at which its wait began.
    """

    def __init__(self, rank: int, kind: str, set_acting: Callable[[int], object]) -> None:
        self.ranks: tuple[int, ...] = (rank,)
        self.kind = kind
        self.poisoned = False
        self.hasty = False
        self.since = 0
        self._set_acting = set_acting
        self._held_back: list[tuple[Run, LaneTask[Any]]] = []
        self._queue: deque[tuple[Run, LaneTask[Any]]] = deque()

    def start(self, job: Job[T], name: str, **details: object) -> LaneTask[T]:
        task: LaneTask[T] = LaneTask()
        self._held_back.append((Run(job), task))
        return task

    def release(self) -> None:
        self._queue.extend(self._held_back)
        self._held_back.clear()

    def ready(self) -> bool:
        if not self._queue:
            return False
        return self.poisoned or (self.hasty and self.votes) or self._queue[0][0].ready()

    def step(self) -> None:
        self._set_acting(self.ranks[0])
        run, task = self._queue[0]
        try:
            self._move(run)
        except StopIteration as end:
            task.end(end.value)
        except Exception as error:
            task.fail(error)
        else:
            return
        self._queue.popleft()

    def strike(self) -> bool:
        """Time passes for the wait that is under way; whether there is one."""
        if not self._queue or self.ready():
            return False
        self._queue[0][0].wait = _TimedOut(self._queue[0][0].wait)
        return True

    @property
    def votes(self) -> bool:
        """Whether it waits for ballots."""
        return bool(self._queue) and isinstance(self._queue[0][0].wait, BallotsReady)

    def close(self) -> None:
        self._held_back.clear()
        while self._queue:
            run, task = self._queue.popleft()
            run.job.close()
            task.fail(WorkerClosed())

    def _move(self, run: Run) -> None:
        if self.poisoned and (run.wait is not None or self.kind not in WAITING):
            self.poisoned = False
            run.throw(Planted(f"the {self.kind} raises"))
            return
        if self.hasty and self.votes and not run.ready():
            self.hasty = False
        run.step()


class _TimedOut:
    """A wait that is over: taking it raises what a deadline would."""

    def __init__(self, wait: WaitFor[Any] | None) -> None:
        assert wait is not None
        self._wait = wait

    def ready(self) -> bool:
        return True

    def wait(self, timeout: float) -> Any:
        return self._wait.wait(timeout)


class LaneHost:
    """The thread of control of a rank.

    Attributes:
        error: what it ended by, if not by its own end.
        ended: whether it has.
    """

    kind = "host"

    def __init__(
        self,
        rank: int,
        job: Generator[WaitFor[Any], Any, None],
        set_acting: Callable[[int], object],
    ) -> None:
        self.ranks: tuple[int, ...] = (rank,)
        self.ended = False
        self.error: BaseException | None = None
        self._set_acting = set_acting
        self._run = Run(job)
        self._running = False

    def ready(self) -> bool:
        return not self.ended and not self._running and self._run.ready()

    def step(self) -> None:
        self._set_acting(self.ranks[0])
        self._running = True
        try:
            self._run.step()
        except StopIteration:
            self.ended = True
        except Exception as error:
            self.ended, self.error = True, error
        finally:
            self._running = False

    def strike(self) -> bool:
        if self.ended or self._run.ready():
            return False
        self._run.wait = _TimedOut(self._run.wait)
        return True

    def close(self) -> None:
        self.ended = True
        if not self._running:
            self._run.job.close()
