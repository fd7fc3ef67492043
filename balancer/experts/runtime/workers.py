"""The workers of an engine: a thread per kind of work, whose jobs begin after the launch.

A job that begins between two steps takes the interpreter's lock, and perhaps the core, from the
thread that is about to launch the forward pass; the device then waits for both. After the launch
nothing waits for the host.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Protocol, TypeAlias, runtime_checkable

from equipoise.balancer.experts.config import BalancerConfig
from equipoise.balancer.experts.runtime.events import NO_EVENTS, EventSink, TraceSpan, Track, now
from equipoise.balancer.experts.runtime.jobs import Job, JobHandle, T, run_blocking


class Worker(Protocol):
    """Runs jobs one after another, in the order of their start, after they are released.

    One thread starts jobs, releases them, and reads their results.
    """

    def start(self, job: Job[T], name: str, **details: object) -> JobHandle[T]:
        """Queues `job` to run after the next `release` and the jobs before it.

        Args:
            job: a job that has not begun.
            name: name of the job in a trace.
            details: fields of the job in a trace.
        """
        ...

    def release(self) -> None:
        """Releases the queued jobs."""
        ...

    def close(self) -> None:
        """Drops jobs that have not begun, and ends a running one at its next wait; bounded."""
        ...


WorkerFactory: TypeAlias = Callable[[Track], Worker]
"""Makes the worker of a kind of work."""


@runtime_checkable
class Traceable(Protocol):
    """A result with a summary for the trace of its job."""

    def trace_fields(self) -> Mapping[str, object]:
        """Returns the fields by name."""
        ...


class WorkerClosed(Exception):
    """The worker was closed while the job waited."""


class _Handle(Generic[T]):
    """The handle of a job, before and after its release."""

    def __init__(self, job: Job[T]) -> None:
        self.job = job
        self.future: Future[T] | None = None

    def done(self) -> bool:
        """Implements `JobHandle`."""
        return self.future is not None and self.future.done()

    def result(self, timeout: float | None = None) -> T:
        """Implements `JobHandle`; raises `TimeoutError` at once if it has not begun."""
        return self._running_future().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Implements `JobHandle`; raises `TimeoutError` at once if it has not begun."""
        return self._running_future().exception(timeout)

    def _running_future(self) -> Future[T]:
        # The thread that waits is the one that releases: waiting for a release would never end.
        if self.future is None:
            raise TimeoutError("the job has not begun")
        return self.future


class ThreadWorker:
    """A worker with its own thread, which emits a span of each job.

    Args:
        kind: kind of work; the thread is named OWNER.KIND.
        timeout: seconds that each wait of a job may last.
        sink: receives the span of each job.
        owner: prefix of the thread's name.
    """

    def __init__(
        self, kind: Track, timeout: float, sink: EventSink = NO_EVENTS, owner: str = "equipoise"
    ) -> None:
        # One thread, so that jobs run in the order of their start: the deletion of keys of votes
        # relies on that (docs/design/engine.md).
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=f"{owner}.{kind}")
        self._threads.submit(int)  # starts the thread now: starting it later would delay a step
        self._kind = kind
        self._timeout = timeout
        self._sink = sink
        self._queued: list[_Handle[object]] = []
        self._open = True

    def start(self, job: Job[T], name: str, **details: object) -> JobHandle[T]:
        """Implements `Worker`."""
        traced_job = job if self._sink is NO_EVENTS else self._trace_job(job, name, details)
        handle = _Handle(traced_job)
        self._queued.append(handle)  # type: ignore[arg-type]
        return handle

    def release(self) -> None:
        """Implements `Worker`."""
        if not self._queued:
            return
        queued, self._queued = self._queued, []
        for handle in queued:
            handle.future = self._threads.submit(
                run_blocking, handle.job, self._timeout, self._check
            )

    def close(self) -> None:
        """Implements `Worker`; takes at most as long as the current wait."""
        self._queued.clear()
        # Before the shutdown, which waits for the running job: it ends at its next `_check`.
        self._open = False
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _check(self) -> None:
        if not self._open:
            raise WorkerClosed

    def _trace_job(self, job: Job[T], name: str, details: Mapping[str, object]) -> Job[T]:
        begin = now()
        try:
            result = yield from job
        except BaseException as error:
            self._emit_span(name, begin, {**details, "failed": f"{type(error).__name__}: {error}"})
            raise
        fields = result.trace_fields() if isinstance(result, Traceable) else {}
        self._emit_span(name, begin, {**details, **fields})
        return result

    def _emit_span(self, name: str, begin: float, details: Mapping[str, object]) -> None:
        self._sink.emit(TraceSpan(name, self._kind, begin, now(), details))


@dataclass(frozen=True)
class Workers:
    """One worker per kind of work, so that none waits for another; all start at `release`.

    Attributes:
        planner: plans rebalances.
        transfer: stages chunks, one after another.
        vote: casts and settles votes.
        shares: solves shares.
        load: waits for sums of load.
    """

    planner: Worker
    transfer: Worker
    vote: Worker
    shares: Worker
    load: Worker

    @staticmethod
    def create(new_worker: WorkerFactory) -> "Workers":
        """Creates one worker of each kind."""
        kinds = (Track.PLANNER, Track.TRANSFER, Track.VOTE, Track.SHARES, Track.LOAD)
        return Workers(*map(new_worker, kinds))

    def release(self) -> None:
        """Releases the queued jobs of all workers."""
        for worker in self._by_urgency:
            worker.release()

    def close(self) -> None:
        """Closes all workers; bounded by their current waits."""
        for worker in self._by_urgency:
            worker.close()

    @cached_property  # read at every boundary
    def _by_urgency(self) -> tuple[Worker, ...]:
        # The vote first: peers wait for its ballot. Plans last: no step waits for them.
        return (self.vote, self.load, self.shares, self.transfer, self.planner)


def thread_workers(config: BalancerConfig, sink: EventSink = NO_EVENTS) -> WorkerFactory:
    """Returns a factory of thread workers."""

    def new_worker(kind: Track) -> Worker:
        # A vote gives up earlier, before the collective in which a peer waits for this rank times
        # out.
        timeout = config.vote_timeout if kind is Track.VOTE else config.timeout
        return ThreadWorker(kind, timeout, sink, f"equipoise.{config.name}")

    return new_worker
