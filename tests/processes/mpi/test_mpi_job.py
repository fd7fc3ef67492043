"""How a job begins and ends, and what it leaves behind."""

import pytest
from helpers.processes.mpi_job import Job
from helpers.processes.process_state import alive
from helpers.processes.shared_memory import left_since, segments
from helpers.rank_programs import mpi
from helpers.rank_programs.operations import close_in_flight

pytest.importorskip("mpi4py", reason="mpi4py is not installed")


def test_mpi_job_with_killed_rank_leaves_no_process_or_memory() -> None:
    before, job = segments(), Job(3)
    processes = job.run(mpi.process_id)
    job.order({"case": "helpers.rank_programs.mpi:die", "deadline": 20.0, "arguments": {"rank": 1}})
    with pytest.raises(AssertionError, match="rank 1 fell silent"):
        job.hear(1)
    assert job.end() != 0
    assert not any(alive(process) for process in processes)
    assert left_since(before) == set()


def test_mpi_job_exits_with_unmatched_operations() -> None:
    before = segments()
    with Job(2) as job:
        # Each waits for its deadline, within which the ranks of a busy machine have to meet, too.
        job.run(close_in_flight, deadline=6.0)
        job.run(mpi.time_out_unmatched_operations, deadline=6.0)
        assert job.end() == 0, job.said
    assert left_since(before) == set()


def test_mpi_job_of_one_rank_exits_0() -> None:
    job = Job(1)
    assert job.run(mpi.reopen, rounds=2) == [[[1], 1, 0]]
    assert job.end() == 0, job.said
