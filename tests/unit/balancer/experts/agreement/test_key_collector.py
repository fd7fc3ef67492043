"""What an engine has asked is kept while anybody can need it, and no longer (C9)."""

import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.backends.virtual import BACKEND
from equipoise.backends.virtual.control_plane import VirtualControlPlane, VirtualStore
from equipoise.backends.virtual.world import VirtualWorld
from equipoise.balancer.experts.agreement.ballot import Ballot, RankStatus
from equipoise.balancer.experts.agreement.key_collector import (
    BEFORE_FIRST_REBALANCE,
    MAX_KEYS_PER_VOTE,
    KeyCollector,
    StoredKey,
)
from equipoise.balancer.experts.runtime.jobs import Job, JobHandle, T, run_blocking

SIZE = 2
ABSENT = None
Vote = tuple[RankStatus | None, ...]
"""What each rank says; None where its ballot does not come."""
WELL: Vote = (RankStatus.PLANNING, RankStatus.TRANSFERRING)
votes = st.lists(
    st.tuples(*[st.sampled_from([*RankStatus, ABSENT])] * SIZE), min_size=1, max_size=4
)


class AtOnce:
    """A worker that carries jobs out where they are started."""

    def start(self, job: Job[T], name: str, **details: object) -> JobHandle[T]:
        run_blocking(job, 1.0)
        return None  # type: ignore[return-value]

    def release(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """Nothing waits."""


@dataclass
class VoteStore:
    """A store, the collector of its rank 0, and what must still be there."""

    world: VirtualWorld
    leftover_keys: tuple[StoredKey, ...] = ()
    collector: KeyCollector = field(init=False)

    def __post_init__(self) -> None:
        self.collector = KeyCollector(self.plane(0), (0, 1), AtOnce(), self.leftover_keys)

    def plane(self, rank: int) -> VirtualControlPlane:
        control = self.world.fabric(rank).control
        assert isinstance(control, VirtualControlPlane)
        return control

    @property
    def store(self) -> VirtualStore:
        return self.world.store

    def vote(self, rebalance: int, due: int, statuses: Vote, label: str = "t") -> None:
        """Casts the ballot of every rank and decides the outcome of the rebalance."""
        question, outcome = f"{label}/{rebalance}/{due}", f"{label}/{rebalance}/move"
        for rank, status in enumerate(statuses):
            if status is not None:
                self.plane(rank).cast(question, Ballot(status).to_bytes())
        self.plane(0).decide(outcome, b"move")
        self.collector.add(rebalance, [question, f"{label}/{rebalance}/{due + 1}"], outcome)
        self.collector.collect(rebalance, question)

    def stored_names(self) -> set[str]:
        """Names of all ballots and decisions in the store."""
        return {name for name, _ in self.store.ballots} | set(self.store.decisions)

    def rebalances(self) -> set[int]:
        """Numbers of the rebalances that those names belong to."""
        return {int(name.split("/")[1]) for name in self.stored_names()}


@pytest.fixture
def vote_store() -> Iterator[VoteStore]:
    with closing(BACKEND.world(SIZE, b"")) as world:
        yield VoteStore(world)


@given(st.lists(votes, min_size=1, max_size=5))
def test_key_collector_keeps_ballots_until_all_ranks_are_healthy_in_later_rebalance(
    rebalances: list[list[Vote]],
) -> None:
    with closing(BACKEND.world(SIZE, b"")) as world:
        vote_store, ballot_keys, last_healthy = VoteStore(world), set[tuple[int, str, int]](), 0
        for rebalance, rebalance_votes in enumerate(rebalances):
            for due, statuses in enumerate(rebalance_votes):
                vote_store.vote(rebalance, due, statuses)
                ballot_keys |= {
                    (rebalance, f"t/{rebalance}/{due}", r) for r in range(SIZE) if statuses[r]
                }
                if ABSENT not in statuses and RankStatus.FAILED not in statuses:
                    last_healthy = rebalance
                uncollected = {
                    (q, rank) for number, q, rank in ballot_keys if number >= last_healthy
                }
                assert uncollected <= vote_store.store.ballots.keys()
                outcomes = {f"t/{number}/move" for number in range(last_healthy, rebalance + 1)}
                assert outcomes <= vote_store.store.decisions.keys()


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6))
def test_key_collector_keeps_only_last_healthy_rebalance(
    lengths: list[int],
) -> None:
    with closing(BACKEND.world(SIZE, b"")) as world:
        vote_store, due = VoteStore(world), 0
        for rebalance, length in enumerate(lengths):
            before = (
                lengths[rebalance - 1] + 2 if rebalance else 0
            )  # its votes, one behind, its outcome
            due = max(0, due + before - MAX_KEYS_PER_VOTE * length)
            for vote in range(length):
                vote_store.vote(rebalance, vote, WELL)
            assert len(vote_store.stored_names()) <= length + 1 + due
            if not due:
                assert vote_store.rebalances() == {rebalance}


def test_key_collector_forgets_ballot_cast_for_next_vote(vote_store: VoteStore) -> None:
    vote_store.vote(0, 1, WELL)
    vote_store.plane(1).cast("t/0/2", Ballot(RankStatus.FAILED, reason="leaves").to_bytes())
    vote_store.vote(1, 5, WELL)
    assert vote_store.rebalances() == {1}


def test_key_collector_leftovers_are_forgotten_by_next_group(vote_store: VoteStore) -> None:
    vote_store.vote(3, 1, WELL)
    leftovers = vote_store.collector.uncollected
    assert {key.rebalance for key in leftovers} == {BEFORE_FIRST_REBALANCE}
    assert vote_store.stored_names() <= {key.name for key in leftovers}
    after = VoteStore(vote_store.world, leftovers)
    after.vote(0, 9, (RankStatus.FAILED, RankStatus.PLANNING), "t.1")
    assert "t/3/1" in after.stored_names()
    after.vote(0, 10, WELL, "t.1")
    assert {name.split("/")[0] for name in after.stored_names()} == {"t.1"}


def test_key_collector_logs_lost_store_and_goes_on(
    vote_store: VoteStore, caplog: pytest.LogCaptureFixture
) -> None:
    vote_store.vote(0, 1, WELL)
    vote_store.collector.add(1, ["t/1/4"], "t/1/move")
    vote_store.world.store.lose()
    with caplog.at_level(logging.WARNING):
        vote_store.collector.collect(1, "t/1/4")
    assert "were not deleted" in caplog.text
