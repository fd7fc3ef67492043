"""The engine on the virtual accelerator: hypothesis chooses who moves next, and what goes wrong."""

import logging
from collections import Counter
from collections.abc import Iterator

import pytest
from exploration.engine.case import Cadence, Case, Fault, FaultKind, Lag, Path
from exploration.engine.oracle import violations
from exploration.engine.records import Record
from exploration.engine.run_case import play
from exploration.engine.strategies import FAULTY, HEALTHY
from helpers.records import RecordProperty, add_row
from helpers.strategies.hypothesis_examples import each_of
from helpers.tiers import DEEP
from hypothesis import given, note, settings
from hypothesis import strategies as st

from equipoise.balancer.experts.placement import ExpertShape
from equipoise.hal.errors import StreamFailed, VoteOutcomeUnknown

pytestmark = pytest.mark.timeout(900)
CASES = 20_000 if DEEP else 400
"""Interleavings: half of them without faults, half with."""
SAMPLE = 200
REASONS = {
    "a rank still drains an aborted rebalance",
    "transfer failed",
    "no ballot from rank(s) 0",
    "no ballot from rank(s) 1",
    "no progress in time",
    "planner failed",
    "plans differ",
    "staged bytes differ",
    "tables differ",
}


@pytest.fixture(autouse=True)
def _unlogged() -> Iterator[None]:
    """Each planted fault would be told."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


class Tally:
    """Plays cases that must break no property, and counts how they end."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.struck: dict[FaultKind, Counter[str]] = {kind: Counter() for kind in FaultKind}

    def play(self, cases: st.SearchStrategy[Case]) -> None:
        @settings(max_examples=CASES // 2)
        @given(cases)
        def played(case: Case) -> None:
            note(repr(case))
            record = play(case)
            assert violations(record) == {}
            self.count(record)

        played()

    def count(self, record: Record) -> None:
        outcome = outcome_of(record)
        self.outcomes[outcome] += 1
        for kind in {fault.kind for fault in record.struck}:
            self.struck[kind][outcome] += 1


OUTCOMES = ("committed", "aborted", "stopped")


def outcome_of(record: Record) -> str:
    """Whether a rank stopped, or a rebalance was aborted, or all committed."""
    if any(
        rank_record.error is not None or rank_record.rank_lost
        for rank_record in record.rank_records
    ):
        return "stopped"
    return (
        "aborted" if any(rank_record.aborts for rank_record in record.rank_records) else "committed"
    )


def outcome_cells(outcomes: Counter[str]) -> dict[str, int]:
    """Cells of a row of docs/deep-results.md."""
    return {"played": outcomes.total(), **{name: outcomes[name] for name in OUTCOMES}}


def test_engine_rebalances_commit_or_expire_under_any_schedule(
    record_property: RecordProperty,
) -> None:
    tally = Tally()
    tally.play(HEALTHY)
    cells = {"of": "engine", "cases": "ranks and streams are late", **outcome_cells(tally.outcomes)}
    add_row(record_property, "interleavings", cells)


def test_engine_keeps_one_layout_or_stops_under_faults(
    record_property: RecordProperty,
) -> None:
    tally = Tally()
    tally.play(FAULTY)
    cells = {"of": "engine", "cases": "with faults", **outcome_cells(tally.outcomes)}
    add_row(record_property, "interleavings", cells)
    for kind, outcomes in tally.struck.items():
        cells = {"of": "engine", "fault": kind.value, **outcome_cells(outcomes)}
        add_row(record_property, "faults explored", cells)


def test_step_that_a_lost_peer_ends_is_void() -> None:
    """Writes of both ranks fail, and one is gone before the other's boundary says so."""
    faults = [Fault(FaultKind.TRANSFER_RAISES, rank, step=1, delay=0) for rank in (0, 1)]
    case = Case(
        shape=ExpertShape(layers=2, experts=4, slots=4, ranks=2),
        staging=2,
        slots_per_message=1,
        path=Path.BY_STREAM,
        cadence=Cadence(1, 1, 1),
        steps=5,
        hot=(0,),
        lags=(Lag("transfer", rank=0, first=1, last=5),),
        faults=tuple(faults),
    )
    record = play(case)
    assert [type(one.error) for one in record.rank_records] == [StreamFailed, VoteOutcomeUnknown]
    assert violations(record) == {}


def test_engine_exploration_replays_case_deterministically() -> None:
    def tell(case: Case) -> None:
        once, replay = play(case), play(case)
        assert once.micro_steps == replay.micro_steps
        assert [rank_record.observations for rank_record in once.rank_records] == [
            s.observations for s in replay.rank_records
        ]

    each_of(FAULTY, 20, tell)


def test_engine_exploration_reaches_every_fault_and_abort_reason() -> None:
    counts: Counter[str] = Counter()
    struck: set[FaultKind] = set()

    def count(case: Case) -> None:
        record = play(case)
        struck.update(fault.kind for fault in record.struck)
        for rank_record in record.rank_records:
            counts.update(rank_record.aborts)
            counts["copies"] += sum(report.copies for report in rank_record.reports)

    each_of(FAULTY, SAMPLE, count)
    assert struck == set(FaultKind)
    assert counts["copies"] > SAMPLE
    assert REASONS - counts.keys() == set()
