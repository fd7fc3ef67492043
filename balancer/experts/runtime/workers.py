"""The workers of an engine: a thread per kind of work, whose jobs begin after the launch.

A job that begins between two steps takes the interpreter's lock, and perhaps the core, from the
thread that is about to launch the forward; the device then waits for both. After the launch
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
    """Carries jobs out one after another, in the order in which they were started.

    It keeps them back until they are released. One thread starts jobs, releases them, and asks for
    their ends.
    """

    def start(self, job: Job[T], name: str, **details: object) -> JobHandle[T]:
        """Begin `job` after the next `release`, when those before it have ended.

        Args:
            job: not begun.
            name: of the job in a trace.
            details: numbers and words to go with it there.
        """
        ...

    def release(self) -> None:
        """Let begin what was started."""
        ...

    def close(self) -> None:
        """Give up what has not begun, and end what has at its next wait; bounded."""
        ...


WorkerFactory: TypeAlias = Callable[[Track], Worker]
"""Makes the worker of a kind."""


@runtime_checkable
class Traceable(Protocol):
    """A result that says in a few numbers and words what its job came to."""

    def trace_fields(self) -> Mapping[str, object]:
        """By name."""
        ...


class WorkerClosed(Exception):
    """The worker was closed while the job waited."""


class _Handle(Generic[T]):
    """A job that its worker keeps back, and what became of it."""

    def __init__(self, job: Job[T]) -> None:
        self.job = job
        self.future: Future[T] | None = None

    def done(self) -> bool:
        """See `JobHandle`."""
        return self.future is not None and self.future.done()

    def result(self, timeout: float | None = None) -> T:
        """See `JobHandle`; raises `TimeoutError` at once where it has not begun."""
        return self._begun().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `JobHandle`; raises `TimeoutError` at once where it has not begun."""
        return self._begun().exception(timeout)

    def _begun(self) -> Future[T]:
        # Whoever starts jobs also releases them and waits for them: a wait here would never end.
        if self.future is None:
            raise TimeoutError("the job has not begun")
        return self.future


class ThreadWorker:
    """A worker with a thread of its own, which tells an event sink of each job.

    Args:
        kind: of work; the thread is named OWNER.KIND.
        timeout: seconds that each wait of a job may last.
        sink: told of each job, from its first step to its last.
        owner: of the thread.
    """

    def __init__(
        self, kind: Track, timeout: float, sink: EventSink = NO_EVENTS, owner: str = "equipoise"
    ) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=f"{owner}.{kind}")
        self._threads.submit(int)  # to have the thread: making it later would cost a step
        self._kind = kind
        self._timeout = timeout
        self._sink = sink
        self._held: list[_Handle[object]] = []
        self._open = True

    def start(self, job: Job[T], name: str, **details: object) -> JobHandle[T]:
        """See `Worker`."""
        traced = job if self._sink is NO_EVENTS else self._traced(job, name, details)
        handle = _Handle(traced)
        self._held.append(handle)  # type: ignore[arg-type]
        return handle

    def release(self) -> None:
        """See `Worker`."""
        if not self._held:
            return
        held, self._held = self._held, []
        for handle in held:
            handle.future = self._threads.submit(
                run_blocking, handle.job, self._timeout, self._check
            )

    def close(self) -> None:
        """See `Worker`; lasts at most as long as the wait that is under way."""
        self._held.clear()
        self._open = False
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _check(self) -> None:
        if not self._open:
            raise WorkerClosed

    def _traced(self, job: Job[T], name: str, details: Mapping[str, object]) -> Job[T]:
        begin = now()
        try:
            result = yield from job
        except BaseException as error:
            self._tell(name, begin, {**details, "failed": f"{type(error).__name__}: {error}"})
            raise
        came_to = result.trace_fields() if isinstance(result, Traceable) else {}
        self._tell(name, begin, {**details, **came_to})
        return result

    def _tell(self, name: str, begin: float, details: Mapping[str, object]) -> None:
        self._sink.emit(TraceSpan(name, self._kind, begin, now(), details))


@dataclass(frozen=True)
class Workers:
    """One worker a kind of work, so that none waits for another; all begin at `release`.

    Attributes:
        planner: plans epochs.
        transfer: stages lots, one after another.
        vote: votes.
        shares: solves shares.
        load: sums loads.
    """

    planner: Worker
    transfer: Worker
    vote: Worker
    shares: Worker
    load: Worker

    @staticmethod
    def create(new_worker: WorkerFactory) -> "Workers":
        """One of each."""
        kinds = (Track.PLANNER, Track.TRANSFER, Track.VOTE, Track.SHARES, Track.LOAD)
        return Workers(*map(new_worker, kinds))

    def release(self) -> None:
        """Let begin what was started."""
        for worker in self._by_urgency:
            worker.release()

    def close(self) -> None:
        """Dismiss all; bounded by the waits that are under way."""
        for worker in self._by_urgency:
            worker.close()

    @cached_property  # every step asks
    def _by_urgency(self) -> tuple[Worker, ...]:
        return (self.vote, self.load, self.shares, self.transfer, self.planner)


def thread_workers(config: BalancerConfig, sink: EventSink = NO_EVENTS) -> WorkerFactory:
    """A thread each; a vote is given up sooner than a peer's collective is."""

    def new_worker(kind: Track) -> Worker:
        timeout = config.vote_timeout if kind is Track.VOTE else config.timeout
        return ThreadWorker(kind, timeout, sink, f"equipoise.{config.name}")

    return new_worker
