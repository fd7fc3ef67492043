from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.agreement.ballot import (
    MASK64,
    Abort,
    Ballot,
    ChunkChecksum,
    Commit,
    Decision,
    Pending,
    RankStatus,
    StartTransfer,
    from_decision,
    tally,
    to_decision,
)
from equipoise.hal.errors import VoteOutcomeUnknown

MARKS = (ChunkChecksum(5, 9, "t"), ChunkChecksum(9, 5, "t"))
"""What two ranks say of a chunk that came through."""
words = st.integers(0, MASK64)
marks = st.builds(ChunkChecksum, sent=words, received=words, tables=st.sampled_from("tu"))
ballots = st.builds(
    Ballot,
    status=st.sampled_from(RankStatus),
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
        b'{"status": "drunk"}',
        b'{"status":"proposed","staged":[],"x":1}',
        b'{"status":"transferring","staged":[{}]}',
    ],
)
def test_ballot_raises_on_unreadable_bytes(text: bytes) -> None:
    with pytest.raises(VoteOutcomeUnknown, match="unreadable"):
        Ballot.from_bytes(text)


def test_judge_moves_on_equal_plans() -> None:
    assert tally([Ballot(RankStatus.PROPOSED, "d")] * 3) == StartTransfer()


def test_judge_aborts_on_different_plans() -> None:
    assert tally([Ballot(RankStatus.PROPOSED, "d"), Ballot(RankStatus.PROPOSED, "e")]) == Abort(
        "plans differ"
    )


def test_judge_aborts_on_different_plans_while_a_rank_plans() -> None:
    rank_ballots = [
        Ballot(RankStatus.PROPOSED, "d"),
        Ballot(RankStatus.PROPOSED, "e"),
        Ballot(RankStatus.PLANNING),
    ]
    assert tally(rank_ballots) == Abort("plans differ")


def test_judge_waits_while_a_rank_plans() -> None:
    assert tally([Ballot(RankStatus.PROPOSED, "d"), Ballot(RankStatus.PLANNING)]) == Pending()


def transferring_ballot(*checksums: ChunkChecksum) -> Ballot:
    return Ballot(RankStatus.TRANSFERRING, "d", checksums)


def test_judge_commits_chunks_with_matching_checksums() -> None:
    assert tally([transferring_ballot(mark) for mark in MARKS]) == Commit(1)
    assert tally([transferring_ballot(mark, mark) for mark in MARKS]) == Commit(2)


def test_judge_commits_only_chunks_staged_on_every_rank() -> None:
    assert tally(
        [transferring_ballot(MARKS[0], MARKS[0]), transferring_ballot(MARKS[1])]
    ) == Commit(1)
    assert tally([transferring_ballot(MARKS[0]), transferring_ballot()]) == Pending()


@pytest.mark.parametrize(("sent_sum", "received_sum"), [(6, 9), (5, 8), (MASK64, 9)])
def test_judge_aborts_when_staged_bytes_differ_from_sources(
    sent_sum: int, received_sum: int
) -> None:
    mismatch = ChunkChecksum(sent_sum, received_sum, "t")
    assert tally([transferring_ballot(mismatch), transferring_ballot(MARKS[1])]) == Abort(
        "staged bytes differ"
    )
    second_differs = [
        transferring_ballot(MARKS[0], mismatch),
        transferring_ballot(MARKS[1], MARKS[1]),
    ]
    assert tally(second_differs) == Abort("staged bytes differ")


def test_judge_compares_sums_of_checksums_modulo_64_bits() -> None:
    high = ChunkChecksum(MASK64, 1, "t"), ChunkChecksum(2, 0, "t")
    assert tally([transferring_ballot(mark) for mark in high]) == Commit(1)


def test_judge_aborts_when_tables_differ() -> None:
    other = replace(MARKS[1], tables="u")
    assert tally([transferring_ballot(MARKS[0]), transferring_ballot(other)]) == Abort(
        "tables differ"
    )


@pytest.mark.parametrize("status", [RankStatus.PLANNING, RankStatus.PROPOSED])
def test_judge_aborts_when_ranks_are_out_of_step(status: RankStatus) -> None:
    assert tally([Ballot(status), transferring_ballot(MARKS[1])]) == Abort("ranks out of step")


def test_judge_aborts_with_reason_of_failed_rank() -> None:
    rank_ballots = [
        Ballot(RankStatus.PLANNING),
        Ballot(RankStatus.FAILED, reason="transfer failed"),
    ]
    assert tally(rank_ballots) == Abort("transfer failed")


@given(st.lists(ballots, min_size=1, max_size=4))
def test_judge_commits_only_verified_staging_of_one_plan(
    rank_ballots: list[Ballot],
) -> None:
    verdict = tally(rank_ballots)
    if isinstance(verdict, Commit):
        assert {ballot.status for ballot in rank_ballots} == {RankStatus.TRANSFERRING}
        assert len({ballot.digest for ballot in rank_ballots if ballot.digest}) <= 1
        for chunk in range(verdict.chunks):
            checksums = [ballot.staged[chunk] for ballot in rank_ballots]
            assert len({mark.tables for mark in checksums}) == 1
            assert (
                sum(m.sent for m in checksums) % 2**64 == sum(m.received for m in checksums) % 2**64
            )


@given(
    st.one_of(
        st.just(StartTransfer()), st.builds(Commit, st.integers(1, 9)), st.builds(Abort, st.text())
    )
)
def test_decision_round_trips_through_bytes(verdict: Decision) -> None:
    assert from_decision(to_decision(verdict)) == verdict


@pytest.mark.parametrize("text", [b"", b"move on", b"commit", b"commit x", b"abor"])
def test_decision_raises_on_unreadable_bytes(text: bytes) -> None:
    with pytest.raises(VoteOutcomeUnknown, match="unreadable"):
        from_decision(text)
