"""Workers whose jobs are noted."""

from typing import Any

import pytest
from helpers.strategies.journal_entries import Kept
from helpers.watchdog import WATCHDOG

from equipoise.balancer.experts.agreement.ballot import Abort, StartTransfer
from equipoise.balancer.experts.engine.traced_worker import WORK, describe, traced
from equipoise.balancer.experts.runtime.events import TraceSpan, Track
from equipoise.balancer.experts.runtime.jobs import Job, JobDone, NamedJob, ThreadWorker, immediate

KINDS = tuple(WORK)


def spans(kept: Kept) -> list[TraceSpan]:
    return [entry for entry in kept.entries if isinstance(entry, TraceSpan)]


@pytest.mark.parametrize("kind", KINDS)
def test_timed_worker_records_span_and_returns_result(kind: str) -> None:
    kept = Kept()
    worker = traced(lambda name: ThreadWorker(name, WATCHDOG), kept)(kind)
    assert worker.start(immediate(lambda: 7)).result(WATCHDOG) == 7
    worker.close()
    (span,) = spans(kept)
    assert (span.track, span.name) == WORK[kind]
    assert span.begin <= span.end
    assert span.details == {}


def test_timed_worker_records_exception_of_job() -> None:
    kept = Kept()
    worker = traced(lambda name: ThreadWorker(name, WATCHDOG), kept)("planner")

    def fail() -> None:
        raise ArithmeticError("too many")

    task = worker.start(immediate(fail))
    assert isinstance(task.exception(WATCHDOG), ArithmeticError)
    worker.close()
    (span,) = spans(kept)
    assert span.details == {"failed": "ArithmeticError: too many"}


def test_timed_worker_names_span_after_titled_job() -> None:
    kept = Kept()
    worker = traced(lambda name: ThreadWorker(name, WATCHDOG), kept)("vote")
    assert (
        worker.start(NamedJob(immediate(StartTransfer), "ask", epoch=3)).result(WATCHDOG)
        == StartTransfer()
    )
    worker.start(NamedJob(immediate(lambda: 1 // 0), "forget", epoch=4)).exception(WATCHDOG)
    worker.close()
    asked, forgot = spans(kept)
    assert (asked.name, asked.details) == ("ask", {"epoch": 3, "verdict": "StartTransfer()"})
    assert (forgot.name, forgot.details["epoch"]) == ("forget", 4)
    assert str(forgot.details["failed"]).startswith("ZeroDivisionError")


def test_timed_worker_runs_job_that_waits() -> None:
    kept = Kept()
    worker = traced(lambda name: ThreadWorker(name, WATCHDOG), kept)("transfer")
    other = ThreadWorker("other", WATCHDOG)

    def job() -> Job[int]:
        came: int = yield JobDone(other.start(immediate(lambda: 3)))
        return came + 1

    assert worker.start(job()).result(WATCHDOG) == 4
    worker.close()
    other.close()
    assert spans(kept)[0].track is Track.TRANSFER


@pytest.mark.parametrize(
    ("result", "details"),
    [
        (None, {}),
        (StartTransfer(), {"verdict": "StartTransfer()"}),
        (Abort("plans differ"), {"verdict": "Abort(reason='plans differ')"}),
    ],
)
def test_describe_summarizes_result_of_job(result: object, details: dict[str, Any]) -> None:
    assert describe(result) == details
