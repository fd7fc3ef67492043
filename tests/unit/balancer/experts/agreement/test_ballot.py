from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.agreement.ballot import (
    WORD,
    Abort,
    Ballot,
    Commit,
    LotMark,
    Move,
    Settled,
    Stand,
    Wait,
    from_decision,
    judge,
    to_decision,
)
from equipoise.hal.errors import AgreementLost

MARKS = (LotMark(5, 9, "t"), LotMark(9, 5, "t"))
"""What two ranks say of a lot that came through."""
words = st.integers(0, WORD)
marks = st.builds(LotMark, sent=words, received=words, tables=st.sampled_from("tu"))
ballots = st.builds(
    Ballot,
    stand=st.sampled_from(Stand),
    digest=st.sampled_from(["", "d", "e"]),
    staged=st.lists(marks, max_size=2).map(tuple),
    reason=st.sampled_from(["", "planner failed"]),
)


@given(ballots)
def test_ballot_round_trips_through_bytes(ballot: Ballot) -> None:
    assert Ballot.from_bytes(ballot.to_bytes()) == ballot


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b'{"stand": "drunk"}',
        b'{"stand":"planned","staged":[],"x":1}',
        b'{"stand":"moving","staged":[{}]}',
    ],
)
def test_ballot_raises_on_unreadable_bytes(text: bytes) -> None:
    with pytest.raises(AgreementLost, match="unreadable"):
        Ballot.from_bytes(text)


def test_judge_moves_on_equal_plans() -> None:
    assert judge([Ballot(Stand.PLANNED, "d")] * 3) == Move()


def test_judge_aborts_on_different_plans() -> None:
    assert judge([Ballot(Stand.PLANNED, "d"), Ballot(Stand.PLANNED, "e")]) == Abort("plans differ")


def test_judge_aborts_on_different_plans_while_a_rank_plans() -> None:
    cast = [Ballot(Stand.PLANNED, "d"), Ballot(Stand.PLANNED, "e"), Ballot(Stand.PLANNING)]
    assert judge(cast) == Abort("plans differ")


def test_judge_waits_while_a_rank_plans() -> None:
    assert judge([Ballot(Stand.PLANNED, "d"), Ballot(Stand.PLANNING)]) == Wait()


def moving(*staged: LotMark) -> Ballot:
    return Ballot(Stand.MOVING, "d", staged)


def test_judge_commits_lots_with_matching_checksums() -> None:
    assert judge([moving(mark) for mark in MARKS]) == Commit(1)
    assert judge([moving(mark, mark) for mark in MARKS]) == Commit(2)


def test_judge_commits_only_lots_staged_on_every_rank() -> None:
    assert judge([moving(MARKS[0], MARKS[0]), moving(MARKS[1])]) == Commit(1)
    assert judge([moving(MARKS[0]), moving()]) == Wait()


@pytest.mark.parametrize(("sent", "received"), [(6, 9), (5, 8), (WORD, 9)])
def test_judge_aborts_when_staged_bytes_differ_from_sources(sent: int, received: int) -> None:
    broken = LotMark(sent, received, "t")
    assert judge([moving(broken), moving(MARKS[1])]) == Abort("staged bytes differ")
    second = [moving(MARKS[0], broken), moving(MARKS[1], MARKS[1])]
    assert judge(second) == Abort("staged bytes differ")


def test_judge_compares_sums_of_checksums_modulo_64_bits() -> None:
    high = LotMark(WORD, 1, "t"), LotMark(2, 0, "t")
    assert judge([moving(mark) for mark in high]) == Commit(1)


def test_judge_aborts_when_tables_differ() -> None:
    other = replace(MARKS[1], tables="u")
    assert judge([moving(MARKS[0]), moving(other)]) == Abort("tables differ")


@pytest.mark.parametrize("stand", [Stand.PLANNING, Stand.PLANNED])
def test_judge_aborts_when_ranks_are_out_of_step(stand: Stand) -> None:
    assert judge([Ballot(stand), moving(MARKS[1])]) == Abort("ranks out of step")


def test_judge_aborts_with_reason_of_failed_rank() -> None:
    cast = [Ballot(Stand.PLANNING), Ballot(Stand.FAILED, reason="move failed")]
    assert judge(cast) == Abort("move failed")


@given(st.lists(ballots, min_size=1, max_size=4))
def test_judge_commits_only_verified_staging_of_one_plan(
    cast: list[Ballot],
) -> None:
    verdict = judge(cast)
    if isinstance(verdict, Commit):
        assert {ballot.stand for ballot in cast} == {Stand.MOVING}
        assert len({ballot.digest for ballot in cast if ballot.digest}) <= 1
        for lot in range(verdict.lots):
            said = [ballot.staged[lot] for ballot in cast]
            assert len({mark.tables for mark in said}) == 1
            assert sum(m.sent for m in said) % 2**64 == sum(m.received for m in said) % 2**64


@given(
    st.one_of(st.just(Move()), st.builds(Commit, st.integers(1, 9)), st.builds(Abort, st.text()))
)
def test_decision_round_trips_through_bytes(verdict: Settled) -> None:
    assert from_decision(to_decision(verdict)) == verdict


@pytest.mark.parametrize("text", [b"", b"move on", b"commit", b"commit x", b"abor"])
def test_decision_raises_on_unreadable_bytes(text: bytes) -> None:
    with pytest.raises(AgreementLost, match="unreadable"):
        from_decision(text)
