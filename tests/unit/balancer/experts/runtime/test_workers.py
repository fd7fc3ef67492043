import threading
from functools import partial

import pytest

from equipoise.balancer.experts.runtime.jobs import ThreadWorker, immediate
from equipoise.balancer.experts.runtime.workers import DeferredWorker, Workers


def test_held_worker_starts_jobs_in_order_after_go() -> None:
    worker, order = DeferredWorker(ThreadWorker("test", 20.0)), list[int]()
    tasks = [worker.start(immediate(partial(order.append, number))) for number in (1, 2)]
    behind = worker._inner.start(immediate(lambda: order.append(0)))
    behind.result(20.0)
    assert order == [0]
    assert not any(task.done() for task in tasks)
    worker.release()
    for task in tasks:
        task.result(20.0)
    assert order == [0, 1, 2]
    worker.release()
    worker.close()
    assert order == [0, 1, 2]


def test_held_worker_result_raises_before_job_has_started() -> None:
    worker = DeferredWorker(ThreadWorker("test", 20.0))
    task = worker.start(immediate(lambda: 7))
    with pytest.raises(TimeoutError, match="has not begun"):
        task.result(20.0)
    with pytest.raises(TimeoutError, match="has not begun"):
        task.exception(20.0)
    worker.release()
    assert (task.result(20.0), task.exception(20.0), task.done()) == (7, None, True)
    worker.close()


def test_held_worker_reports_exception_of_job() -> None:
    def broken() -> None:
        raise ValueError("heard")

    worker = DeferredWorker(ThreadWorker("test", 20.0))
    task = worker.start(immediate(broken))
    worker.release()
    assert isinstance(task.exception(20.0), ValueError)
    worker.close()


def test_held_worker_drops_held_jobs_on_close() -> None:
    worker, begun = DeferredWorker(ThreadWorker("test", 20.0)), threading.Event()
    task = worker.start(immediate(begun.set))
    worker.close()
    worker.release()
    assert not task.done()
    assert not begun.is_set()


def test_held_workers_start_every_job_after_go() -> None:
    staff = Workers.created(lambda name: ThreadWorker(name, 20.0))
    names = ["planner", "transfer", "vote", "shares", "load"]
    tasks = [getattr(staff, name).start(immediate(lambda: 1)) for name in names]
    staff.release()
    assert [task.result(20.0) for task in tasks] == [1] * len(names)
    staff.close()
