import threading

import pytest

from equipoise.balancer.experts.runtime.jobs import Job, run_blocking


class Given:
    """A wait whose end somebody else decides."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.begun = threading.Event()
        self.error: Exception | None = None

    def ready(self) -> bool:
        return self.came.is_set()

    def wait(self, timeout: float) -> str:
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


def test_job_wait_ends_at_deadline() -> None:
    with pytest.raises(TimeoutError):
        run_blocking(collecting(Given()), 0.01)
