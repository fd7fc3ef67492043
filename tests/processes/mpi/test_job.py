"""How a job begins and ends, and what it leaves behind."""

import pytest
from helpers.processes.job import Job
from helpers.processes.processes import alive
from helpers.processes.shared_memory import left_since, segments
from helpers.rank_programs import mpi
from helpers.rank_programs.works import close_in_flight

pytest.importorskip("mpi4py", reason="mpi4py is not installed")


def test_a_killed_rank_ends_the_job_and_leaves_neither_process_nor_memory() -> None:
    before, job = segments(), Job(3)
    processes = job.run(mpi.process_id)
    job.order({"case": "helpers.rank_programs.mpi:die", "deadline": 20.0, "arguments": {"rank": 1}})
    with pytest.raises(AssertionError, match="rank 1 fell silent"):
        job.hear(1)
    assert job.end() != 0
    assert not any(alive(process) for process in processes)
    assert left_since(before) == set()


def test_a_job_with_operations_that_never_end_still_ends_well() -> None:
    before, job = segments(), Job(2)
    job.run(close_in_flight, deadline=1.0)
    for op in ("all_reduce", "irecv", "long isend"):
        job.run(mpi.unmatched, deadline=1.0, op=op)
    assert job.end() == 0, job.said
    assert left_since(before) == set()


def test_a_job_of_one_rank_is_a_job() -> None:
    job = Job(1)
    assert job.run(mpi.reopen, rounds=2) == [[[1], 1]]
    assert job.end() == 0, job.said
