"""Operations in flight over MPI, threads, and communicators: clauses A4, P6, R1, X5."""

from collections.abc import Callable

import pytest
from helpers.processes.job import Job
from helpers.rank_programs import mpi, works

Running = Callable[[int], Job]


@pytest.mark.parametrize(("sent", "expected"), [(3, 5), (5, 3), (0, 1), (50000, 70000)])
def test_a_message_of_another_size_than_its_receive_is_an_error(
    job: Running, sent: int, expected: int
) -> None:
    """Clause A4: a receive that is filled in part is no success."""
    _, one = job(2).run(mpi.another_size, deadline=1.5, sent=sent, expected=expected)
    assert one["error"] == "CommunicatorFailed"


def test_what_cannot_be_carried_out_is_unsupported_before_any_side_effect(job: Running) -> None:
    zero, _ = job(2).run(works.bad_calls, deadline=3.0)
    assert len(zero) > 20
    assert {answer["call"]: answer["error"] for answer in zero} == {
        answer["call"]: "Unsupported" for answer in zero
    }


def test_threads_share_a_communicator_and_a_fabric(job: Running) -> None:
    """Clause P6; collectives of one communicator come from one thread, or from one each."""
    for wrong, in_order, alive in job(4).run(mpi.from_threads, rounds=20):
        assert wrong == []
        assert in_order
        assert not any(alive)


def test_threads_open_communicators_in_any_order(job: Running) -> None:
    assert job(4).run(mpi.open_from_threads) == [{"left": 10, "right": 10}] * 4


def test_groups_that_cannot_be_are_unsupported(job: Running) -> None:
    assert job(2).run(mpi.refusals) == [["Unsupported"] * 4] * 2


def test_a_communicator_that_a_peer_never_opens_fails_and_names_it(job: Running) -> None:
    answer, _ = job(2).run(mpi.lonely, deadline=1.5)
    assert answer["error"] == "CommunicatorFailed"
    assert "rank(s) (1,) did not open 'lonely'" in answer["text"]


def test_communicators_that_were_closed_give_back_what_the_library_has_few_of(
    job: Running,
) -> None:
    """Clause R1: MPICH has about 2,000 contexts, and each communicator takes one more."""
    assert job(2).run(mpi.reopen, rounds=2100) == [[[1], 3]] * 2


def test_what_a_communicator_left_unread_does_not_reach_the_next(job: Running) -> None:
    assert job(2).run(mpi.left_behind, rounds=4) == [[0, 1, 2, 3]] * 2
