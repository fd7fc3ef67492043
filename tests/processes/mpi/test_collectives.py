"""Collectives and messages over MPI, where the library has limits: clauses S4, P1, P4."""

from collections.abc import Callable

from helpers.processes.mpi_job import Job
from helpers.rank_programs import mpi


def test_mpi_collectives_accept_misaligned_addresses(job: Callable[[int], Job]) -> None:
    """Clause S4."""
    assert job(2).run(mpi.misaligned) == [[True] * 10] * 2


def test_mpi_ring_of_sends_before_receives_completes(job: Callable[[int], Job]) -> None:
    """Clause P1: nothing but the progress thread moves messages of this size."""
    assert job(4).run(mpi.ring, elements=1_000_000) == [True] * 4


def test_mpi_groups_sharing_ranks_progress_independently(
    job: Callable[[int], Job],
) -> None:
    """Clause P4."""
    answers = job(4).run(mpi.overlapping)
    assert answers[0] == {"0123": [0, 1111], "210": [2, 111]}
    assert answers[1] == {"0123": [1, 1111], "210": [1, 111], "13": [0, 1010]}
    assert answers[2] == {"0123": [2, 1111], "210": [0, 111]}
    assert answers[3] == {"0123": [3, 1111], "13": [1, 1010]}
