import threading
import time

import pytest

from equipoise.balancer.experts.runtime.jobs import (
    Job,
    NamedJob,
    ThreadWorker,
    WorkerClosed,
    immediate,
    run_blocking,
)


class Given:
    """A wait whose end somebody else decides."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.begun = threading.Event()
        self.error: Exception | None = None

    def ready(self) -> bool:
        return self.came.is_set()

    def take(self, timeout: float) -> str:
        self.begun.set()
        if not self.came.wait(timeout):
            raise TimeoutError
        if self.error is not None:
            raise self.error
        return "came"


def collecting(*waits: Given) -> Job[list[str]]:
    found = []
    for wait in waits:
        found.append((yield wait))
    return found


def test_job_receives_results_of_its_waits() -> None:
    waits = Given(), Given()
    for wait in waits:
        wait.came.set()
    assert run_blocking(collecting(*waits), 1.0) == ["came", "came"]


def test_job_may_catch_exception_of_a_wait() -> None:
    wait = Given()
    wait.error = ValueError("broken")
    wait.came.set()

    def forgiving() -> Job[str]:
        try:
            yield wait
        except ValueError as error:
            return f"caught {error}"
        return "nothing"

    assert run_blocking(forgiving(), 1.0) == "caught broken"
    with pytest.raises(ValueError, match="broken"):
        run_blocking(collecting(wait), 1.0)


def test_titled_job_runs_like_the_inner_job() -> None:
    good, bad = Given(), Given()
    bad.error = ValueError("broken")
    for wait in (good, bad):
        wait.came.set()
    titled = NamedJob(collecting(good, good), "move", epoch=3)
    assert (titled.name, titled.details) == ("move", {"epoch": 3})
    assert run_blocking(titled, 1.0) == ["came", "came"]
    with pytest.raises(ValueError, match="broken"):
        run_blocking(NamedJob(collecting(good, bad), "move"), 1.0)


def test_titled_job_close_closes_inner_job() -> None:
    ended = []

    def job() -> Job[None]:
        try:
            yield Given()
        finally:
            ended.append(True)

    titled = NamedJob(job(), "move")
    next(titled)
    titled.close()
    assert ended == [True]


def test_job_wait_ends_at_deadline() -> None:
    with pytest.raises(TimeoutError):
        run_blocking(collecting(Given()), 0.01)


def test_worker_runs_jobs_in_order() -> None:
    worker, gate, order = ThreadWorker("test", 20.0), Given(), list[str]()

    def first() -> Job[None]:
        yield gate
        order.append("first")

    tasks = worker.start(first()), worker.start(immediate(lambda: order.append("second")))
    assert not any(task.done() for task in tasks)
    gate.came.set()
    for task in tasks:
        task.result(20.0)
    worker.close()
    assert order == ["first", "second"]


def test_worker_continues_after_failed_job() -> None:
    worker = ThreadWorker("test", 20.0)

    def broken() -> None:
        raise ValueError("heard")

    failed = worker.start(immediate(broken))
    assert isinstance(failed.exception(20.0), ValueError)
    assert worker.start(immediate(lambda: 7)).result(20.0) == 7
    worker.close()


def test_worker_close_ends_job_at_next_wait() -> None:
    worker, gate, never = ThreadWorker("test", 20.0), Given(), Given()
    task = worker.start(collecting(gate, never))
    assert gate.begun.wait(20.0)
    closing = threading.Thread(target=worker.close)
    closing.start()
    expiry = time.monotonic() + 20.0
    while worker._open and time.monotonic() < expiry:
        time.sleep(0.001)
    assert not worker._open
    gate.came.set()
    closing.join(20.0)
    assert not closing.is_alive()
    assert isinstance(task.exception(0.0), WorkerClosed)
