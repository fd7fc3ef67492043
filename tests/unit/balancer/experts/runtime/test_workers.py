import threading
import time
from functools import partial
from typing import Any

import pytest
from helpers.eager_worker import EagerWorker
from helpers.strategies.engine_events import RecordingSink
from helpers.watchdog import WATCHDOG

from equipoise.balancer.experts.agreement.ballot import Abort, StartTransfer
from equipoise.balancer.experts.runtime.events import TraceSpan, Track
from equipoise.balancer.experts.runtime.jobs import Job, JobDone, immediate
from equipoise.balancer.experts.runtime.workers import ThreadWorker, WorkerClosed, Workers

KINDS = (Track.PLANNER, Track.TRANSFER, Track.VOTE, Track.SHARES, Track.LOAD)


class Gate:
    """A wait that ends when the test sets `opening`."""

    def __init__(self) -> None:
        self.opening = threading.Event()
        self.wait_started = threading.Event()

    def ready(self) -> bool:
        return self.opening.is_set()

    def wait(self, timeout: float) -> None:
        self.wait_started.set()
        if not self.opening.wait(timeout):
            raise TimeoutError


def waiting(*gates: Gate) -> Job[None]:
    yield from gates


def raise_error() -> None:
    raise ValueError("heard")


def test_worker_starts_jobs_in_order_after_release() -> None:
    worker, order = ThreadWorker(Track.VOTE, WATCHDOG), list[int]()
    tasks = [worker.start(immediate(partial(order.append, number)), "job") for number in (1, 2)]
    assert not any(task.done() for task in tasks)
    assert order == []
    worker.release()
    for task in tasks:
        task.result(WATCHDOG)
    assert order == [1, 2]
    worker.release()
    worker.close()
    assert order == [1, 2]


def test_worker_starts_job_when_those_before_it_have_ended() -> None:
    worker, gate, order = EagerWorker(Track.VOTE, WATCHDOG), Gate(), list[str]()

    def first() -> Job[None]:
        yield gate
        order.append("first")

    tasks = (
        worker.start(first(), "job"),
        worker.start(immediate(lambda: order.append("second")), "job"),
    )
    assert not any(task.done() for task in tasks)
    gate.opening.set()
    for task in tasks:
        task.result(WATCHDOG)
    worker.close()
    assert order == ["first", "second"]


def test_worker_result_raises_at_once_before_release() -> None:
    worker = ThreadWorker(Track.VOTE, WATCHDOG)
    task = worker.start(immediate(lambda: 7), "job")
    with pytest.raises(TimeoutError, match="has not begun"):
        task.result(WATCHDOG)
    with pytest.raises(TimeoutError, match="has not begun"):
        task.exception(WATCHDOG)
    worker.release()
    assert (task.result(WATCHDOG), task.exception(WATCHDOG), task.done()) == (7, None, True)
    worker.close()


def test_worker_continues_after_failed_job() -> None:
    worker = EagerWorker(Track.VOTE, WATCHDOG)
    failing_task = worker.start(immediate(raise_error), "job")
    assert isinstance(failing_task.exception(WATCHDOG), ValueError)
    assert worker.start(immediate(lambda: 7), "job").result(WATCHDOG) == 7
    worker.close()


def test_worker_close_ends_job_at_next_wait() -> None:
    worker, gate, closed_gate = EagerWorker(Track.VOTE, WATCHDOG), Gate(), Gate()
    task = worker.start(waiting(gate, closed_gate), "job")
    assert gate.wait_started.wait(WATCHDOG)
    close_thread = threading.Thread(target=worker.close)
    close_thread.start()
    expiry = time.monotonic() + WATCHDOG
    while worker._open and time.monotonic() < expiry:
        time.sleep(0.001)
    assert not worker._open
    gate.opening.set()
    close_thread.join(WATCHDOG)
    assert not close_thread.is_alive()
    assert isinstance(task.exception(0.0), WorkerClosed)


def test_worker_close_drops_jobs_that_were_not_released() -> None:
    worker, job_started = ThreadWorker(Track.VOTE, WATCHDOG), threading.Event()
    task = worker.start(immediate(job_started.set), "job")
    worker.close()
    worker.release()
    assert not task.done()
    assert not job_started.is_set()


def test_workers_start_every_job_after_release() -> None:
    workers = Workers.create(lambda kind: ThreadWorker(kind, WATCHDOG))
    tasks = [getattr(workers, kind).start(immediate(lambda: 1), "job") for kind in KINDS]
    workers.release()
    assert [task.result(WATCHDOG) for task in tasks] == [1] * len(KINDS)
    workers.close()


def spans(sink: RecordingSink) -> list[TraceSpan]:
    return [entry for entry in sink.events if isinstance(entry, TraceSpan)]


@pytest.mark.parametrize("kind", KINDS)
def test_worker_tells_sink_of_job_and_its_details(kind: Track) -> None:
    sink = RecordingSink()
    worker = EagerWorker(kind, WATCHDOG, sink)
    assert worker.start(immediate(lambda: 7), "job", rebalance=3).result(WATCHDOG) == 7
    worker.close()
    (span,) = spans(sink)
    assert (span.track, span.name) == (kind, "job")
    assert span.begin <= span.end
    assert span.details == {"rebalance": 3}


def test_worker_tells_sink_of_exception_of_job() -> None:
    sink = RecordingSink()
    worker = EagerWorker(Track.PLANNER, WATCHDOG, sink)
    task = worker.start(immediate(raise_error), "plan", rebalance=4)
    assert isinstance(task.exception(WATCHDOG), ValueError)
    worker.close()
    (span,) = spans(sink)
    assert span.details == {"rebalance": 4, "failed": "ValueError: heard"}


def test_worker_traces_job_that_waits() -> None:
    sink = RecordingSink()
    worker, other = EagerWorker(Track.TRANSFER, WATCHDOG, sink), EagerWorker(Track.VOTE, WATCHDOG)

    def job() -> Job[int]:
        other_result: int = yield JobDone(other.start(immediate(lambda: 3), "job"))
        return other_result + 1

    assert worker.start(job(), "job").result(WATCHDOG) == 4
    worker.close()
    other.close()
    assert spans(sink)[0].track is Track.TRANSFER


@pytest.mark.parametrize(
    ("result", "details"),
    [
        (None, {}),
        (StartTransfer(), {"verdict": "StartTransfer()"}),
        (Abort("plans differ"), {"verdict": "Abort(reason='plans differ')"}),
    ],
)
def test_worker_tells_sink_what_job_came_to(result: object, details: dict[str, Any]) -> None:
    sink = RecordingSink()
    worker = EagerWorker(Track.VOTE, WATCHDOG, sink)
    worker.start(immediate(lambda: result), "vote", rebalance=3).result(WATCHDOG)
    worker.close()
    (span,) = spans(sink)
    assert span.details == {"rebalance": 3, **details}
