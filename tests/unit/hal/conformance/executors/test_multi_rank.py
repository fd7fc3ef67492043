"""Deadlines of a subject whose ranks are processes: they follow the speed of the machine."""

import itertools
import time
from collections.abc import Collection, Mapping

import pytest
from hypothesis import strategies as st

from equipoise.hal.capabilities import Capabilities, CommunicatorCapabilities
from equipoise.hal.conformance.context import Play, RankContext
from equipoise.hal.conformance.executors.multi_rank import (
    OPEN_TIMES_PER_DEADLINE,
    RETRY_DEADLINE_FACTORS,
    DisposableStore,
    GatherOptions,
    MultiRankSubject,
    RankStore,
    answers_or_raise,
)
from equipoise.hal.conformance.executors.rank_worker import FaultPriority, RankReply, RankRequest
from equipoise.hal.conformance.program import Case, Program, Step, make_program
from equipoise.hal.conformance.property import DeadlineLength, Property, PropertyScope, Traits
from equipoise.hal.errors import Unsupported, Violation

DEADLINES = {DeadlineLength.LONG: 15.0, DeadlineLength.SHORT: 1.0}
LONGER, LONGEST = RETRY_DEADLINE_FACTORS
IDLE, BUSY = 0.02, 0.5
"""Seconds that an opening takes."""
CASE = Case(make_program([Step("sum")], size=2))


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    return st.just(CASE.program)


def _play(ctx: RankContext, program: Program) -> Play:
    yield from ()


def _property(name: str, pace: DeadlineLength) -> Property:
    return Property(
        name=name,
        family="failures",
        clauses=("E1",),
        claim="A fault ends every wait.",
        programs=_programs,
        play=_play,
        scope=PropertyScope.GROUP,
        deadline=pace,
    )


FIRST, SECOND = _property("first", DeadlineLength.SHORT), _property("second", DeadlineLength.SHORT)
CALM = _property("calm", DeadlineLength.LONG)


class FakeStore:
    """Of no use but its address."""

    address = ("localhost", 1)

    def report_loss(self, rank: int, how: str) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Nothing is held."""


class FakeRankGroup:
    """Ranks that are slow to open a communicator, and fail with too short a deadline.

    Args:
        openings: seconds, by gauging; the last one from then on.
        needed: seconds of a deadline without which a case fails.
        clause: that it breaks then.
    """

    def __init__(self, openings: list[float], needed: float, clause: str = "E1") -> None:
        self._openings = openings
        self.needed = needed
        self._clause = clause
        self.deadlines: dict[str, float] = {}
        self.played_deadlines: list[float] = []

    def open_store(self) -> RankStore:
        return FakeStore()

    def open_disposable_store(self) -> DisposableStore:
        raise Unsupported("a store that a case may end")

    def request(
        self, orders: Mapping[int, RankRequest], call: GatherOptions
    ) -> dict[int, RankReply]:
        return {rank: self._answer(rank, order) for rank, order in orders.items()}

    def replace(self, ranks: Collection[int]) -> None:
        raise AssertionError("nobody was lost")

    def close(self) -> None:
        pass

    def _answer(self, rank: int, order: RankRequest) -> RankReply:
        match order["do"]:
            case "open":
                self.deadlines[order["fabric"]] = order["where"]["deadline"]
            case "gauge":
                last = rank > 0 and len(self._openings) > 1
                return {"answers": [self._openings.pop(0) if last else self._openings[0]]}
            case "play":
                deadline = self.deadlines[order["fabric"]]
                if rank == 0:
                    self.played_deadlines.append(deadline)
                if deadline < self.needed:
                    return {"fault": [1, self._clause, "an operation passed its deadline"]}
        return {"answers": [None]}


def subject(rank_group: FakeRankGroup) -> MultiRankSubject:
    traits = Traits(Capabilities(), CommunicatorCapabilities(), (1, 2), controlled=False)
    return MultiRankSubject("fake", traits, rank_group, DEADLINES)


def test_brisk_deadline_grows_when_machine_is_busy_at_later_property() -> None:
    rank_group = FakeRankGroup([IDLE, BUSY], needed=0.0)
    ranks = subject(rank_group)
    for prop in (FIRST, FIRST, SECOND):
        ranks.play(prop, CASE)
    assert rank_group.played_deadlines == [1.0, 1.0, OPEN_TIMES_PER_DEADLINE * BUSY]


def test_brisk_deadline_shrinks_when_machine_is_idle_again() -> None:
    rank_group = FakeRankGroup([BUSY, IDLE], needed=0.0)
    ranks = subject(rank_group)
    for prop in (FIRST, SECOND):
        ranks.play(prop, CASE)
    assert rank_group.played_deadlines == [OPEN_TIMES_PER_DEADLINE * BUSY, 1.0]


@pytest.mark.parametrize(("lasts", "expired"), [(14.0, False), (15.0, True)])
def test_violation_tells_whether_it_waited_for_long_deadline(
    monkeypatch: pytest.MonkeyPatch, lasts: float, expired: bool
) -> None:
    times = itertools.chain([0.0], itertools.repeat(lasts))
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    with pytest.raises(Violation) as caught:
        subject(FakeRankGroup([IDLE], needed=100.0)).play(CALM, CASE)
    assert caught.value.expired is expired


def test_failed_brisk_case_is_played_again_with_longer_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rank_group = FakeRankGroup([IDLE], needed=2.0)
    ranks = subject(rank_group)
    for prop in (FIRST, FIRST, SECOND):
        ranks.play(prop, CASE)
    assert rank_group.played_deadlines == [1.0, LONGER, LONGER, 1.0, LONGER]
    assert "first: a case failed under a brisk deadline" in caplog.text


def test_replayed_case_gets_deadline_of_machine_as_it_is_now() -> None:
    rank_group = FakeRankGroup([IDLE, BUSY], needed=2.0)
    subject(rank_group).play(FIRST, CASE)
    assert rank_group.played_deadlines == [
        1.0,
        LONGER * OPEN_TIMES_PER_DEADLINE * BUSY,
    ]


def test_later_failure_on_a_machine_that_became_busier_is_played_again() -> None:
    rank_group = FakeRankGroup([IDLE], needed=2.0)
    ranks = subject(rank_group)
    ranks.play(FIRST, CASE)
    rank_group.needed = 5.0
    ranks.play(FIRST, CASE)
    assert rank_group.played_deadlines == [1.0, LONGER, LONGER, LONGEST]


def test_second_failure_of_brisk_case_counts() -> None:
    rank_group = FakeRankGroup([IDLE], needed=1000.0)
    ranks = subject(rank_group)
    for _ in range(2):  # the second one as shrinking plays it
        with pytest.raises(Violation, match="passed its deadline"):
            ranks.play(FIRST, CASE)
    assert rank_group.played_deadlines == [1.0, LONGER, 1.0]


def test_rare_failure_of_brisk_property_counts_when_it_comes_again() -> None:
    rank_group = FakeRankGroup([IDLE], needed=2.0)
    ranks = subject(rank_group)
    ranks.play(FIRST, CASE)
    rank_group.needed = 1000.0
    with pytest.raises(Violation, match="passed its deadline"):
        ranks.play(FIRST, CASE)
    assert rank_group.played_deadlines == [1.0, LONGER, LONGER, LONGEST]


@pytest.mark.parametrize("clause", ["C8", "R1"])
def test_hang_or_leak_of_brisk_property_counts_at_once(clause: str) -> None:
    rank_group = FakeRankGroup([IDLE], needed=1000.0, clause=clause)
    with pytest.raises(Violation, match=clause):
        subject(rank_group).play(FIRST, CASE)
    assert rank_group.played_deadlines == [1.0]


def test_failure_of_calm_property_counts_at_once() -> None:
    rank_group = FakeRankGroup([IDLE], needed=1000.0)
    with pytest.raises(Violation, match="passed its deadline"):
        subject(rank_group).play(CALM, CASE)
    assert rank_group.played_deadlines == [15.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raised OSError", "K5: rank 1: raised OSError"),
        ("rank 1, step 0: gone", "K5: rank 1, step 0: gone"),
        ("rank 12: gone", "K5: rank 1: rank 12: gone"),
    ],
)
def test_violation_names_the_rank_that_saw_it_once(text: str, message: str) -> None:
    replies: dict[int, RankReply] = {
        0: {"answers": []},
        1: {"fault": [FaultPriority.VIOLATION, "K5", text]},
    }
    with pytest.raises(Violation) as raised:
        answers_or_raise("K1", replies)
    assert str(raised.value) == message
