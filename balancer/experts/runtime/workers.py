"""The workers of an engine, whose jobs begin only when the forward has been launched.

A job that begins between two steps takes the interpreter's lock, and perhaps the core, from the
thread that is about to launch the forward; the device then waits for both. After the launch
nothing waits for the host.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Generic

from equipoise.balancer.experts.config import BalancerConfig
from equipoise.balancer.experts.runtime.jobs import (
    Job,
    JobHandle,
    T,
    ThreadWorker,
    Worker,
    WorkerFactory,
)


class DeferredHandle(Generic[T]):
    """A job that was started with a worker that keeps it back.

    Args:
        job: not begun.
    """

    def __init__(self, job: Job[T]) -> None:
        self._job = job
        self._task: JobHandle[T] | None = None

    def release(self, worker: Worker) -> None:
        """Let it begin."""
        self._task = worker.start(self._job)

    def done(self) -> bool:
        """See `JobHandle`."""
        return self._task is not None and self._task.done()

    def result(self, timeout: float | None = None) -> T:
        """See `JobHandle`; raises `TimeoutError` at once where it has not begun."""
        return self._begun().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `JobHandle`; raises `TimeoutError` at once where it has not begun."""
        return self._begun().exception(timeout)

    def _begun(self) -> JobHandle[T]:
        """Who starts jobs also lets them go and waits for them: waiting here would be for ever."""
        if self._task is None:
            raise TimeoutError("the job has not begun")
        return self._task


class DeferredWorker:
    """Keeps jobs back until they are let go; then they begin in the order in which they came.

    One thread starts jobs, lets them go, and asks for their ends.

    Args:
        inner: carries the jobs out.
    """

    def __init__(self, inner: Worker) -> None:
        self._inner = inner
        self._held: list[DeferredHandle[object]] = []

    def start(self, job: Job[T]) -> JobHandle[T]:
        """See `Worker`; begins at the next `go`."""
        task = DeferredHandle(job)
        self._held.append(task)  # type: ignore[arg-type]
        return task

    def release(self) -> None:
        """Let begin what was kept back."""
        if not self._held:
            return
        held, self._held = self._held, []
        for task in held:
            task.release(self._inner)

    def close(self) -> None:
        """See `Worker`."""
        self._held.clear()
        self._inner.close()


@dataclass(frozen=True)
class Workers:
    """One worker a kind of work, so that none waits for another; all begin at `go`.

    Attributes:
        planner: plans epochs.
        transfer: stages lots, one after another.
        vote: votes.
        shares: solves shares.
        load: sums loads.
    """

    planner: DeferredWorker
    transfer: DeferredWorker
    vote: DeferredWorker
    shares: DeferredWorker
    load: DeferredWorker

    @staticmethod
    def created(hire: WorkerFactory) -> "Workers":
        """One of each."""
        kinds = ("planner", "transfer", "vote", "shares", "load")
        return Workers(*(DeferredWorker(hire(kind)) for kind in kinds))

    def release(self) -> None:
        """Let begin what was started."""
        for worker in self._everybody:
            worker.release()

    def close(self) -> None:
        """Dismiss all; bounded by the waits that are under way."""
        for worker in self._everybody:
            worker.close()

    @cached_property  # every step asks
    def _everybody(self) -> tuple[DeferredWorker, ...]:
        """Most urgent first."""
        return (self.vote, self.load, self.shares, self.transfer, self.planner)


def thread_workers(config: BalancerConfig) -> WorkerFactory:
    """A thread each; the clerk's patience is less than what a peer's collective has."""

    def hire(kind: str) -> Worker:
        deadline = config.vote_timeout if kind == "vote" else config.timeout
        return ThreadWorker(f"equipoise.{config.name}.{kind}", deadline)

    return hire
