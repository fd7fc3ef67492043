"""Jobs of two and of four ranks, each started once."""

from collections.abc import Callable, Iterator

import pytest
from helpers.processes.mpi_job import Job


@pytest.fixture(scope="session")
def job() -> Iterator[Callable[[int], Job]]:
    """`job(size)`: the running job of so many ranks."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    jobs: dict[int, Job] = {}

    def running_job(size: int) -> Job:
        if size in jobs and jobs[size].process.poll() is not None:
            jobs.pop(size).end()  # the test that lost it has failed: others get a new one
        if size not in jobs:
            jobs[size] = Job(size)
        return jobs[size]

    yield running_job
    assert [one.end() for one in jobs.values()] == [0] * len(jobs), "a job ended with an error"
