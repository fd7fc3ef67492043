"""Operations in flight over MPI, threads, and communicators: clauses A4, P6, R1, X5."""

from collections.abc import Callable

import pytest
from helpers.processes.mpi_job import Job
from helpers.rank_programs import mpi
from helpers.rank_programs import operations as works

StartJob = Callable[[int], Job]


@pytest.mark.parametrize(("message_size", "expected"), [(3, 5), (5, 3), (0, 1), (50000, 70000)])
def test_message_of_other_size_than_receive_fails(
    job: StartJob, message_size: int, expected: int
) -> None:
    """Clause A4: a receive that is filled in part is no success."""
    _, one = job(2).run(mpi.another_size, deadline=6.0, sent=message_size, expected=expected)
    assert one["error"] == "CommunicatorFailed"


def test_unsupported_calls_are_refused_without_side_effect(job: StartJob) -> None:
    zero, _ = job(2).run(works.bad_calls)
    assert len(zero) > 20
    assert {answer["call"]: answer["error"] for answer in zero} == {
        answer["call"]: "Unsupported" for answer in zero
    }


def test_threads_share_mpi_communicator_and_fabric(job: StartJob) -> None:
    """Clause P6; collectives of one communicator come from one thread, or from one each."""
    for mistakes, in_order, alive in job(4).run(mpi.from_threads, rounds=20):
        assert mistakes == []
        assert in_order
        assert not any(alive)


def test_threads_open_mpi_communicators_in_any_order(job: StartJob) -> None:
    assert job(4).run(mpi.open_from_threads, deadline=120.0) == [{"left": 10, "right": 10}] * 4


def test_open_refuses_invalid_group_ranks(job: StartJob) -> None:
    assert job(2).run(mpi.refusals) == [["Unsupported"] * 4] * 2


def test_open_names_missing_peer(job: StartJob) -> None:
    answer, _ = job(2).run(mpi.lonely, deadline=5.0)
    assert answer["error"] == "CommunicatorFailed"
    assert "rank(s) (1,) did not open 'lonely'" in answer["text"]


def test_closed_communicators_release_mpi_contexts(
    job: StartJob,
) -> None:
    """Clause R1: MPICH has about 2,000 contexts, and each communicator takes one more."""
    assert job(2).run(mpi.reopen, rounds=2100) == [[[1], 3, 0]] * 2


def test_unread_messages_do_not_reach_next_communicator(job: StartJob) -> None:
    assert job(2).run(mpi.left_behind, rounds=4) == [[0, 1, 2, 3]] * 2
