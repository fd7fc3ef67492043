"""Workers that tell a journal what they did, and when."""

from equipoise.balancer.experts.agreement.ballot import Verdict
from equipoise.balancer.experts.placement import SHARE_ONE
from equipoise.balancer.experts.planning.proposal import Proposal
from equipoise.balancer.experts.routing.layer_update import LayerUpdate
from equipoise.balancer.experts.runtime.events import EventSink, TraceSpan, Track, now
from equipoise.balancer.experts.runtime.jobs import (
    Job,
    JobHandle,
    NamedJob,
    T,
    Worker,
    WorkerFactory,
)
from equipoise.balancer.experts.transfer.p2p import ReadyChunk

WORK = {
    "planner": (Track.PLANNER, "plan"),
    "transfer": (Track.TRANSFER, "move"),
    "vote": (Track.VOTE, "vote"),
    "shares": (Track.SHARES, "shares"),
    "load": (Track.LOAD, "sum"),
}
"""Kinds of workers: where their work is shown, and as what where a job has no name of its own."""


class TracedWorker:
    """A worker whose jobs are noted, from their first step to their last.

    Args:
        inner: carries the jobs out.
        kind: of worker, one of `WORK`.
        journal: told of each job.
    """

    def __init__(self, inner: Worker, kind: str, journal: EventSink) -> None:
        self._inner = inner
        self._track, self._name = WORK[kind]
        self._journal = journal

    def start(self, job: Job[T]) -> JobHandle[T]:
        """See `Worker`."""
        return self._inner.start(self._timed(job))

    def close(self) -> None:
        """See `Worker`."""
        self._inner.close()

    def _timed(self, job: Job[T]) -> Job[T]:
        begin = now()
        try:
            result = yield from job
        except BaseException as error:
            self._tell(job, begin, {"failed": f"{type(error).__name__}: {error}"})
            raise
        self._tell(job, begin, describe(result))
        return result

    def _tell(self, job: Job[T], begin: float, came: dict[str, object]) -> None:
        name, known = self._name, {}
        if isinstance(job, NamedJob):
            name, known = job.name, job.details
        self._journal.emit(TraceSpan(name, self._track, begin, now(), {**known, **came}))


def traced(hire: WorkerFactory, journal: EventSink) -> WorkerFactory:
    """The same workers, timed."""
    return lambda kind: TracedWorker(hire(kind), kind, journal)


def describe(result: object) -> dict[str, object]:
    """What a job came to, in a few numbers and words."""
    match result:
        case Proposal(draft, changes):
            before, after = draft.before.mean() / SHARE_ONE, draft.predicted.mean() / SHARE_ONE
            numbers: dict[str, object] = {"layers": len(draft.order), "lots": len(changes)}
            return {**numbers, "before": round(before, 4), "predicted": round(after, 4)}
        case ReadyChunk(staged, change):
            size = {"copies": len(staged.copies), "bytes received": staged.bytes_received}
            return {"layers": list(change.layers), **size}
        case LayerUpdate() as change:
            return {"layers": list(change.layers)}
    return {"verdict": str(result)} if isinstance(result, Verdict) else {}
