import threading

import pytest

from equipoise.balancer.experts.runtime.jobs import Job, run_blocking


class ManualWait:
    """A wait that ends when the test sets `arrival`."""

    def __init__(self) -> None:
        self.arrival = threading.Event()
        self.wait_started = threading.Event()
        self.error: Exception | None = None

    def ready(self) -> bool:
        return self.arrival.is_set()

    def wait(self, timeout: float) -> str:
        self.wait_started.set()
        if not self.arrival.wait(timeout):
            raise TimeoutError
        if self.error is not None:
            raise self.error
        return "came"


def collect_answers(*waits: ManualWait) -> Job[list[str]]:
    answers = []
    for wait in waits:
        answers.append((yield wait))
    return answers


def test_job_receives_results_of_its_waits() -> None:
    waits = ManualWait(), ManualWait()
    for wait in waits:
        wait.arrival.set()
    assert run_blocking(collect_answers(*waits), 1.0) == ["came", "came"]


def test_job_may_catch_exception_of_a_wait() -> None:
    wait = ManualWait()
    wait.error = ValueError("broken")
    wait.arrival.set()

    def catch_error() -> Job[str]:
        try:
            yield wait
        except ValueError as error:
            return f"caught {error}"
        return "nothing"

    assert run_blocking(catch_error(), 1.0) == "caught broken"
    with pytest.raises(ValueError, match="broken"):
        run_blocking(collect_answers(wait), 1.0)


def test_job_wait_ends_at_deadline() -> None:
    with pytest.raises(TimeoutError):
        run_blocking(collect_answers(ManualWait()), 0.01)
