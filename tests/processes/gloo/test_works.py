"""Operations that fail, and communicators that go on afterwards: clauses E4, E6, E9, X5."""

from helpers.processes.ranks import Ranks
from helpers.rank_programs import works

from equipoise.backends.cpu import GLOO


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


def test_survivors_of_a_kill_learn_who_it_was_and_go_on_without_it(ranks: Ranks) -> None:
    assert GLOO.capabilities.rebuild
    zero, nobody, two = ranks.run(works.lose_by_kill, 3, rank=1, lost=[1])
    assert nobody is None
    for place, answer in enumerate((zero, two)):
        assert answer["failed"]["error"] == "CommunicatorFailed"
        assert answer["lost"] == [1, "was killed by SIGKILL", "the sum that rank 1 misses"]
        assert answer["place"] == [place, 2]
        assert answer["total"] == 3
