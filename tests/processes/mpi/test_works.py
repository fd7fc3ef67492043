"""Operations in flight over MPI, and what is left of them: clauses K1 to K5, P3, E2 to E5."""

from collections.abc import Callable

import pytest
from helpers.processes.job import Job
from helpers.rank_programs import mpi, works

Running = Callable[[int], Job]


def test_a_receive_that_was_given_up_softly_still_arrives(job: Running) -> None:
    zero, one = job(2).run(works.soft_then_late)
    assert zero["early"] == ["ResultPending", "ResultPending", "False"]
    assert zero["again"] == ["", ""]
    assert zero["done"]
    assert zero["data"] == [0, 1, 2, 3, 4]
    assert zero["total"] == one == 3


def test_a_collective_that_was_given_up_softly_still_ends(job: Running) -> None:
    assert job(2).run(works.soft_collective) == [["ResultPending", "False", 3], 3]


def test_a_stream_waits_for_an_operation_without_the_host(job: Running) -> None:
    zero, _ = job(2).run(works.wait_on_stream)
    assert zero == {"before": [], "seen": [42], "done": True}


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("irecv", "irecv from 1"),
        ("isend", "isend to 1"),
        ("long isend", "isend to 1"),
        ("exchange", "exchange"),
        ("all_reduce", "all_reduce"),
        ("barrier", "barrier"),
    ],
)
def test_what_nobody_matches_fails_its_communicator_by_the_deadline_and_no_other(
    job: Running, op: str, name: str
) -> None:
    zero, one = job(2).run(mpi.unmatched, deadline=1.5, op=op)
    assert zero["first"]["error"] == "OperationTimeout"
    assert zero["first"]["text"] == f"{name} of 'broken' passed its deadline"
    assert zero["again"] == ["OperationTimeout", "True"]
    assert zero["later"]["error"] == "CommunicatorFailed"
    assert "passed its deadline" in zero["later"]["text"]
    assert zero["sound"] == one["sound"] == 3


@pytest.mark.parametrize(("sent", "expected"), [(3, 5), (5, 3), (0, 1), (50000, 70000)])
def test_a_message_of_another_size_than_its_receive_is_an_error(
    job: Running, sent: int, expected: int
) -> None:
    """Clause A4: a receive that is filled in part is no success."""
    _, one = job(2).run(mpi.another_size, deadline=1.5, sent=sent, expected=expected)
    assert one["error"] == "CommunicatorFailed"


def test_a_cancelled_operation_ends_at_once_and_fails_its_communicator(job: Running) -> None:
    for answer in job(2).run(mpi.cancelled):
        assert set(answer["ends"]) == {"CommunicatorFailed"}
        assert answer["text"].endswith("was cancelled")
        assert all(answer["done"])
        assert "was cancelled" in answer["later"]
        assert answer["sound"] == 3


def test_what_cannot_be_carried_out_is_unsupported_before_any_side_effect(job: Running) -> None:
    zero, _ = job(2).run(works.bad_calls, deadline=3.0)
    assert len(zero) > 20
    assert {answer["call"]: answer["error"] for answer in zero} == {
        answer["call"]: "Unsupported" for answer in zero
    }


def test_closing_with_work_in_flight_is_bounded_and_ends_the_work(job: Running) -> None:
    zero, _ = job(2).run(works.close_in_flight, deadline=1.5)
    assert zero["closing"]["error"] == ""
    assert zero["later"]["error"] == "CommunicatorFailed"
    assert "was closed" in zero["later"]["text"]
    assert set(zero["ends"]) <= {"OperationTimeout", "CommunicatorFailed"}


def test_dropped_works_neither_cancel_nor_leak(job: Running) -> None:
    for answer in job(2).run(works.drop_everything, rounds=20):
        assert answer == {"threads": 0, "alive": 0, "gone": True}


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
