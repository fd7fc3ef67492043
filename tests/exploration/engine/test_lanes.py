"""Hosts and workers as lanes: what a driver relies on."""

from dataclasses import dataclass
from typing import Any

import pytest
from exploration.engine.lane import LaneHost, LaneWorker, Planted

from equipoise.balancer.experts.jobs import Dismissed, Job, Task, at_once


@dataclass
class Bell:
    """Comes when it is rung."""

    rung: bool = False

    def ready(self) -> bool:
        return self.rung

    def take(self, timeout: float) -> str:
        if not self.rung:
            raise TimeoutError("nobody rings")
        return "ding"


def heard(bell: Bell) -> Job[str]:
    said: str = yield bell
    return said


def worker(kind: str = "mover") -> LaneWorker:
    return LaneWorker(0, kind, lambda rank: None)


def test_a_job_moves_from_wait_to_wait_and_ends_with_its_result() -> None:
    lane, bell = worker(), Bell()
    task = lane.start(heard(bell))
    lane.step()
    assert not lane.ready()
    bell.rung = True
    lane.step()
    assert task.result() == "ding"


def test_jobs_run_in_the_order_in_which_they_were_started() -> None:
    lane, bell = worker(), Bell()
    lane.start(heard(bell))
    second = lane.start(at_once(lambda: 2))
    lane.step()
    assert not lane.ready()
    assert not second.done()
    bell.rung = True
    lane.step()
    lane.step()
    assert second.result() == 2


def test_a_wait_that_time_passes_for_raises_in_its_job() -> None:
    lane = worker()
    task = lane.start(heard(Bell()))
    assert not lane.strike(), "a job that has not begun waits for nothing"
    lane.step()
    assert lane.strike()
    lane.step()
    assert isinstance(task.exception(), TimeoutError)


def test_a_poisoned_worker_raises_in_its_next_job_only() -> None:
    lane = worker("planner")
    lane.poisoned = True
    first, second = lane.start(at_once(lambda: 1)), lane.start(at_once(lambda: 2))
    lane.step()
    lane.step()
    assert isinstance(first.exception(), Planted)
    assert second.result() == 2


def test_a_poisoned_worker_whose_jobs_wait_raises_where_one_waits() -> None:
    lane = worker()
    lane.poisoned = True
    task = lane.start(heard(Bell()))
    lane.step()
    assert not task.done()
    lane.step()
    assert isinstance(task.exception(), Planted)


def test_a_task_that_has_not_ended_has_no_result() -> None:
    with pytest.raises(TimeoutError):
        worker().start(at_once(lambda: 1)).result()


def test_a_worker_that_is_closed_gives_up_what_waits() -> None:
    lane = worker()
    tasks: list[Task[Any]] = [lane.start(heard(Bell())), lane.start(at_once(lambda: 1))]
    lane.step()
    lane.close()
    assert [type(task.exception()) for task in tasks] == [Dismissed, Dismissed]
    assert not lane.ready()


def test_a_host_keeps_what_it_ended_by() -> None:
    def job() -> Job[None]:
        yield Bell(rung=True)
        raise ValueError("enough")

    host = LaneHost(0, job(), lambda rank: None)
    host.step()
    host.step()
    assert host.ended
    assert isinstance(host.error, ValueError)
    assert not host.ready()
