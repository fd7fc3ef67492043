"""The engine on the virtual accelerator: hypothesis chooses who moves next, and what goes wrong."""

import logging
from collections import Counter
from collections.abc import Iterator

import pytest
from exploration.engine.case import Case, FaultKind
from exploration.engine.oracle import violations
from exploration.engine.play import play
from exploration.engine.strategies import FAULTY, HEALTHY
from helpers.strategies.drawing import each_of
from helpers.tiers import DEEP
from hypothesis import given, note, settings

pytestmark = pytest.mark.timeout(900)
CASES = 20_000 if DEEP else 400
"""Interleavings: half of them without faults, half with."""
SAMPLE = 200
REASONS = {
    "a rank still drains an aborted epoch",
    "move failed",
    "no ballot from rank(s) 0",
    "no ballot from rank(s) 1",
    "out of patience",
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


@settings(max_examples=CASES // 2)
@given(HEALTHY)
def test_whatever_is_late_every_epoch_commits_everywhere_or_runs_out_of_patience(
    case: Case,
) -> None:
    note(repr(case))
    assert violations(play(case)) == {}


@settings(max_examples=CASES // 2)
@given(FAULTY)
def test_whatever_goes_wrong_ranks_keep_what_is_installed_or_commit_it_together_or_stop(
    case: Case,
) -> None:
    note(repr(case))
    assert violations(play(case)) == {}


def test_a_case_is_played_alike_each_time() -> None:
    def tell(case: Case) -> None:
        once, again = play(case), play(case)
        assert once.moved == again.moved
        assert [story.sights for story in once.stories] == [s.sights for s in again.stories]

    each_of(FAULTY, 20, tell)


def test_the_exploration_comes_to_commits_to_every_fault_and_to_every_reason_of_an_abort() -> None:
    seen: Counter[str] = Counter()
    struck: set[FaultKind] = set()

    def count(case: Case) -> None:
        record = play(case)
        struck.update(fault.kind for fault in record.struck)
        for story in record.stories:
            seen.update(story.aborts)
            seen["copies"] += sum(report.slots for report in story.reports)

    each_of(FAULTY, SAMPLE, count)
    assert struck == set(FaultKind)
    assert seen["copies"] > SAMPLE
    assert REASONS - seen.keys() == set()
