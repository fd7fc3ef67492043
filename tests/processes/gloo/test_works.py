"""Operations in flight, and what is left when they fail: clauses K1 to K5, P3, E1 to E5, E9, X3."""

from helpers.processes.ranks import Ranks
from helpers.rank_programs import works

from equipoise.backends.cpu import GLOO


def test_a_receive_that_was_given_up_softly_still_arrives(ranks: Ranks) -> None:
    zero, one = ranks.run(works.soft_then_late, 2)
    assert zero["early"] == ["ResultPending", "ResultPending", "False"]
    assert zero["again"] == ["", ""]
    assert zero["done"]
    assert zero["data"] == [0, 1, 2, 3, 4]
    assert zero["total"] == one == 3


def test_a_collective_that_was_given_up_softly_still_ends(ranks: Ranks) -> None:
    assert ranks.run(works.soft_collective, 2) == [["ResultPending", "False", 3], 3]


def test_a_stream_waits_for_an_operation_without_the_host(ranks: Ranks) -> None:
    zero, _ = ranks.run(works.wait_on_stream, 2)
    assert zero == {"before": [], "seen": [42], "done": True}


def test_an_unmatched_receive_fails_its_communicator_by_the_deadline_and_no_other(
    ranks: Ranks,
) -> None:
    zero, one = ranks.run(works.unmatched, 2, deadline=1.5)
    assert zero["first"]["error"] == zero["again"]["error"] == "OperationTimeout"
    assert zero["first"]["text"] == "irecv from 1 of 'broken' passed its deadline"
    assert zero["done"]
    assert one["first"]["error"] in ("OperationTimeout", "CommunicatorFailed")
    for answer in (zero, one):
        assert answer["later"]["error"] == "CommunicatorFailed"
        assert "passed its deadline" in answer["later"]["text"] or answer is one
        assert answer["sound"] == answer["rebuilt"] == 3


def test_the_late_end_of_a_cancelled_operation_does_not_fail_the_rebuilt_communicator(
    ranks: Ranks,
) -> None:
    for answer in ranks.run(works.cancel_and_rebuild, 2, deadline=1.5):
        assert answer["later"]["error"] == "CommunicatorFailed"
        assert "was cancelled" in answer["later"]["text"]
        assert (answer["before"], answer["ended"], answer["after"]) == (3, True, 3)


def test_what_cannot_be_carried_out_is_unsupported_before_any_side_effect(ranks: Ranks) -> None:
    zero, _ = ranks.run(works.bad_calls, 2, deadline=3.0)
    assert len(zero) > 20
    assert {answer["call"]: answer["error"] for answer in zero} == {
        answer["call"]: "Unsupported" for answer in zero
    }


def test_closing_with_work_in_flight_is_bounded_and_leaves_no_thread(ranks: Ranks) -> None:
    zero, _ = ranks.run(works.close_in_flight, 2, deadline=1.5)
    assert zero["closing"]["error"] == ""
    assert zero["later"]["error"] == "CommunicatorFailed"
    assert "was closed" in zero["later"]["text"]
    assert set(zero["ends"]) <= {"OperationTimeout", "CommunicatorFailed"}
    assert zero["threads"]


def test_dropped_works_neither_cancel_nor_leak(ranks: Ranks) -> None:
    """Each of gloo's two threads holds on to its latest operation: that is all that may remain,
    and a thread of ours for each direction until the end."""
    for answer in ranks.run(works.drop_everything, 2, rounds=20):
        assert answer["threads"] <= 2
        assert answer["alive"] <= 2
        assert answer["gone"]


def test_survivors_of_a_kill_learn_who_it_was_and_go_on_without_it(ranks: Ranks) -> None:
    assert GLOO.capabilities.rebuild
    zero, nobody, two = ranks.run(works.lose_by_kill, 3, rank=1, lost=[1])
    assert nobody is None
    for place, answer in enumerate((zero, two)):
        assert answer["failed"]["error"] == "CommunicatorFailed"
        assert answer["lost"] == [1, "was killed by SIGKILL", "the sum that rank 1 misses"]
        assert answer["place"] == [place, 2]
        assert answer["total"] == 3


def test_a_stopped_rank_is_named_by_its_silence_and_nobody_before_it(ranks: Ranks) -> None:
    answers = ranks.run(works.lose_by_stop, 3, rank=2, lost=[2])
    for answer in answers[:2]:
        assert answer["early"] is None
        rank, how, operation = answer["lost"]
        assert (rank, operation) == (2, "a step")
        assert how.startswith("fell silent")
