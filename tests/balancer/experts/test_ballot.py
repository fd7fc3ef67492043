import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.ballot import Abort, Ballot, Commit, Move, Stand, Wait, judge
from equipoise.hal.errors import AgreementLost

STAGED = (
    Ballot(Stand.STAGED, "d", sent={"1": "a"}, received={"1": "b"}),
    Ballot(Stand.STAGED, "d", sent={"0": "b"}, received={"0": "a"}),
)
marks = st.dictionaries(st.sampled_from("0123"), st.text("ab", max_size=2), max_size=3)
ballots = st.builds(
    Ballot,
    stand=st.sampled_from(Stand),
    digest=st.sampled_from(["", "d", "e"]),
    sent=marks,
    received=marks,
    reason=st.sampled_from(["", "planner failed"]),
)


@given(ballots)
def test_a_ballot_survives_the_wire(ballot: Ballot) -> None:
    assert Ballot.from_bytes(ballot.to_bytes()) == ballot


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b'{"stand": "drunk"}', b'{"stand":"busy","x":1}']
)
def test_an_unreadable_ballot_is_an_error_and_not_a_vote(text: bytes) -> None:
    with pytest.raises(AgreementLost, match="unreadable"):
        Ballot.from_bytes(text)


def test_equal_plans_may_move() -> None:
    assert judge([Ballot(Stand.PLANNED, "d")] * 3) == Move()


def test_different_plans_abort() -> None:
    assert judge([Ballot(Stand.PLANNED, "d"), Ballot(Stand.PLANNED, "e")]) == Abort("plans differ")


def test_different_plans_abort_even_while_somebody_is_busy() -> None:
    cast = [Ballot(Stand.PLANNED, "d"), Ballot(Stand.PLANNED, "e"), Ballot(Stand.BUSY)]
    assert judge(cast) == Abort("plans differ")


def test_one_busy_rank_makes_all_wait() -> None:
    assert judge([Ballot(Stand.PLANNED, "d"), Ballot(Stand.BUSY)]) == Wait()


def test_staging_that_equals_its_sources_commits() -> None:
    assert judge(STAGED) == Commit()


@pytest.mark.parametrize("side", ["sent", "received"])
@pytest.mark.parametrize("marks", [{}, {"1": "x"}, {"1": "a", "2": "a"}])
def test_staging_that_differs_from_its_sources_aborts(side: str, marks: dict[str, str]) -> None:
    fields = {"sent": STAGED[0].sent, "received": STAGED[0].received, side: marks}
    broken = Ballot(Stand.STAGED, "d", fields["sent"], fields["received"])
    assert judge([broken, STAGED[1]]) == Abort("staged bytes differ")


def test_ranks_that_are_out_of_step_abort() -> None:
    assert judge([Ballot(Stand.PLANNED, "d"), STAGED[1]]) == Abort("ranks out of step")


def test_a_failed_rank_aborts_with_its_reason() -> None:
    cast = [Ballot(Stand.BUSY), Ballot(Stand.FAILED, reason="move failed")]
    assert judge(cast) == Abort("move failed")


@given(st.lists(ballots, min_size=1, max_size=4))
def test_nothing_commits_unless_every_rank_has_verified_staging_of_one_plan(
    cast: list[Ballot],
) -> None:
    if judge(cast) == Commit():
        assert all(ballot.stand is Stand.STAGED for ballot in cast)
        assert len({ballot.digest for ballot in cast if ballot.digest}) <= 1
        sent = sum(len(ballot.sent) for ballot in cast)
        assert sent == sum(len(ballot.received) for ballot in cast)
