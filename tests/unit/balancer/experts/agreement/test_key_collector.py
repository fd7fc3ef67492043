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
class Office:
    """A store, the archive of its rank 0, and what must still be there."""

    world: VirtualWorld
    leavings: tuple[StoredKey, ...] = ()
    archive: KeyCollector = field(init=False)

    def __post_init__(self) -> None:
        self.archive = KeyCollector(self.plane(0), (0, 1), AtOnce(), self.leavings)

    def plane(self, rank: int) -> VirtualControlPlane:
        control = self.world.fabric(rank).control
        assert isinstance(control, VirtualControlPlane)
        return control

    @property
    def store(self) -> VirtualStore:
        return self.world.store

    def vote(self, rebalance: int, due: int, stands: Vote, label: str = "t") -> None:
        """Every rank says its word, and the rebalance's outcome is settled."""
        question, outcome = f"{label}/{rebalance}/{due}", f"{label}/{rebalance}/move"
        for rank, stand in enumerate(stands):
            if stand is not None:
                self.plane(rank).cast(question, Ballot(stand).to_bytes())
        self.plane(0).decide(outcome, b"move")
        self.archive.add(rebalance, [question, f"{label}/{rebalance}/{due + 1}"], outcome)
        self.archive.collect(rebalance, question)

    def asked(self) -> set[str]:
        """What the store holds."""
        return {name for name, _ in self.store.ballots} | set(self.store.decisions)

    def rebalances(self) -> set[int]:
        """Whose questions those are."""
        return {int(name.split("/")[1]) for name in self.asked()}


@pytest.fixture
def office() -> Iterator[Office]:
    with closing(BACKEND.world(SIZE, b"")) as world:
        yield Office(world)


@given(st.lists(votes, min_size=1, max_size=5))
def test_key_collector_keeps_ballots_until_all_ranks_are_healthy_in_later_rebalance(
    rebalances: list[list[Vote]],
) -> None:
    with closing(BACKEND.world(SIZE, b"")) as world:
        office, cast, past = Office(world), set[tuple[int, str, int]](), 0
        for rebalance, drawn in enumerate(rebalances):
            for due, stands in enumerate(drawn):
                office.vote(rebalance, due, stands)
                cast |= {(rebalance, f"t/{rebalance}/{due}", r) for r in range(SIZE) if stands[r]}
                if ABSENT not in stands and RankStatus.FAILED not in stands:
                    past = rebalance
                kept = {(q, rank) for number, q, rank in cast if number >= past}
                assert kept <= office.store.ballots.keys()
                outcomes = {f"t/{number}/move" for number in range(past, rebalance + 1)}
                assert outcomes <= office.store.decisions.keys()


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6))
def test_key_collector_keeps_only_last_healthy_rebalance(
    lengths: list[int],
) -> None:
    with closing(BACKEND.world(SIZE, b"")) as world:
        office, due = Office(world), 0
        for rebalance, length in enumerate(lengths):
            before = (
                lengths[rebalance - 1] + 2 if rebalance else 0
            )  # its votes, one behind, its outcome
            due = max(0, due + before - MAX_KEYS_PER_VOTE * length)
            for vote in range(length):
                office.vote(rebalance, vote, WELL)
            assert len(office.asked()) <= length + 1 + due
            if not due:
                assert office.rebalances() == {rebalance}


def test_key_collector_forgets_ballot_cast_for_next_vote(office: Office) -> None:
    office.vote(0, 1, WELL)
    office.plane(1).cast("t/0/2", Ballot(RankStatus.FAILED, reason="leaves").to_bytes())
    office.vote(1, 5, WELL)
    assert office.rebalances() == {1}


def test_key_collector_leftovers_are_forgotten_by_next_group(office: Office) -> None:
    office.vote(3, 1, WELL)
    left = office.archive.uncollected
    assert {filed.rebalance for filed in left} == {BEFORE_FIRST_REBALANCE}
    assert office.asked() <= {filed.name for filed in left}
    after = Office(office.world, left)
    after.vote(0, 9, (RankStatus.FAILED, RankStatus.PLANNING), "t.1")
    assert "t/3/1" in after.asked()
    after.vote(0, 10, WELL, "t.1")
    assert {name.split("/")[0] for name in after.asked()} == {"t.1"}


def test_key_collector_logs_lost_store_and_goes_on(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    office.vote(0, 1, WELL)
    office.archive.add(1, ["t/1/4"], "t/1/move")
    office.world.store.lose()
    with caplog.at_level(logging.WARNING):
        office.archive.collect(1, "t/1/4")
    assert "were not deleted" in caplog.text
