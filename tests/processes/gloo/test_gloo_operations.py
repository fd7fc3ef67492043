"""Operations that fail, and communicators that go on afterwards: clauses E4, E6, E9, X5."""

from helpers.processes.rank_pool import Ranks
from helpers.rank_programs import operations as works

from equipoise.backends.cpu import GLOO


def test_gloo_cancelled_operation_does_not_fail_rebuilt_communicator(
    ranks: Ranks,
) -> None:
    for answer in ranks.run(works.cancel_and_rebuild, 2, deadline=5.0):
        assert answer["later"]["error"] == "CommunicatorFailed"
        assert "was cancelled" in answer["later"]["text"]
        assert (answer["before"], answer["ended"], answer["after"]) == (3, True, 3)


def test_gloo_refuses_invalid_calls_before_any_side_effect(ranks: Ranks) -> None:
    zero, _ = ranks.run(works.bad_calls, 2)
    assert len(zero) > 20
    assert {answer["call"]: answer["error"] for answer in zero} == {
        answer["call"]: "Unsupported" for answer in zero
    }


def test_gloo_survivors_name_killed_rank_and_rebuild(ranks: Ranks) -> None:
    assert GLOO.capabilities.rebuild
    zero, nobody, two = ranks.run(works.lose_by_kill, 3, rank=1, lost=[1])
    assert nobody is None
    for place, answer in enumerate((zero, two)):
        assert answer["failed"]["error"] == "CommunicatorFailed"
        assert answer["lost"] == [1, "was killed by SIGKILL", "the sum that rank 1 misses"]
        assert answer["place"] == [place, 2]
        assert answer["total"] == 3
