"""How a violation is shrunk: bounded by plays, whatever the clock says."""

import dataclasses
import itertools
import time
from collections.abc import Callable

import pytest
from hypothesis import strategies as st

from equipoise.hal.capabilities import Capabilities
from equipoise.hal.conformance.context import Play, RankContext
from equipoise.hal.conformance.program import Case, Program, Step, make_program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.conformance.search import (
    PropertyNotJudged,
    PropertyViolated,
    SearchSettings,
    search,
)
from equipoise.hal.conformance.subject import NotJudgeable
from equipoise.hal.errors import Violation

LEAST = 100
HOUR = 3600.0


def _never(ctx: RankContext, program: Program) -> Play:
    raise NotImplementedError
    yield


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    numbers = st.lists(st.integers(0, 10_000), max_size=12)
    return numbers.map(lambda addends: make_program([Step("add", (number,)) for number in addends]))


SUMS = Property(
    name="sums-are-small",
    family="ordering",
    clauses=("O1",),
    claim="Numbers add up to less than `LEAST`.",
    programs=_programs,
    play=_never,
)


class Adder:
    """Breaks `BAD_CHECKSUMS` where a program adds up to `LEAST`; tells `passing` of every play."""

    name = "adder"
    traits = Traits(Capabilities(), None, (1,), controlled=True)

    def __init__(self, passing: Callable[[], object] = lambda: None, expired: bool = False) -> None:
        self.plays = 0
        self.violations = 0
        self._expired = expired
        self.broke_at: int | None = None
        self._passing = passing

    def play(self, prop: Property, case: Case) -> None:
        self.plays += 1
        self._passing()
        if sum(int(step.args[0]) for step in case.program.steps) >= LEAST:
            self.broke_at = self.broke_at or self.plays
            self.violations += 1
            violation = Violation("O1", "too much")
            violation.expired = self._expired
            raise violation

    def close(self) -> None:
        pass


def test_search_shrinks_identically_on_slow_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdict = search(SUMS, Adder(), SearchSettings(cases=100))
    hours = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(hours) * HOUR)
    slow_verdict = search(SUMS, Adder(), SearchSettings(cases=100))
    assert slow_verdict == verdict
    assert isinstance(slow_verdict, PropertyViolated)
    assert slow_verdict.case == Case(make_program([Step("add", (LEAST,))]), b"")


@pytest.mark.parametrize("shrinks", [0, 1, 4])
def test_shrinking_ends_after_few_plays_that_waited_for_deadline(shrinks: int) -> None:
    """The first violation is none of them; where none may wait, it is reported as it was drawn."""
    adder = Adder(expired=True)
    verdict = search(SUMS, adder, SearchSettings(cases=100, max_expired_shrinks=shrinks))
    assert isinstance(verdict, PropertyViolated)
    assert verdict.expired_plays == adder.violations == 1 + shrinks
    quick = Adder()
    search(SUMS, quick, SearchSettings(cases=100, max_expired_shrinks=shrinks))
    assert quick.violations > adder.violations


@pytest.mark.parametrize("plays", [0, 1, 10])
def test_shrinking_takes_at_most_the_given_number_of_plays(plays: int) -> None:
    adder = Adder()
    verdict = search(SUMS, adder, SearchSettings(cases=100, max_shrinks=plays))
    assert isinstance(verdict, PropertyViolated)
    assert adder.broke_at is not None
    assert adder.plays <= adder.broke_at + plays
    assert verdict.cases == adder.plays


class Racing(Adder):
    """Breaks a program of two or more additions, but not the first time that it is played."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Case] = set()

    def play(self, prop: Property, case: Case) -> None:
        self.plays += 1
        if len(case.program.steps) >= 2 and case in self.seen:
            raise Violation("O1", "lost a race")
        self.seen.add(case)


def _few_programs(_: Traits) -> st.SearchStrategy[Program]:
    """Many draws give the same program, of one to twelve additions."""
    numbers = st.lists(st.integers(0, 1).filter(lambda number: number != 1), max_size=12)
    return numbers.map(lambda addends: make_program([Step("add", (0,)) for _ in addends]))


@pytest.mark.parametrize("seed", range(10))
def test_race_between_equal_cases_is_violation_and_no_error_of_hypothesis(seed: int) -> None:
    races = dataclasses.replace(SUMS, programs=_few_programs)
    verdict = search(races, Racing(), SearchSettings(cases=100, seed=seed))
    assert isinstance(verdict, PropertyViolated)
    assert verdict.what == "O1: lost a race"
    assert len(verdict.case.program.steps) >= 2


def test_search_says_why_spoilt_subject_was_not_judged() -> None:
    class Spoilt(Adder):
        """Means nothing from the third play on."""

        def play(self, prop: Property, case: Case) -> None:
            self.plays += 1
            if self.plays > 2:
                raise NotJudgeable("a stream stands still")

    spoilt = Spoilt()
    verdict = search(SUMS, spoilt, SearchSettings(cases=100))
    assert verdict == PropertyNotJudged("a stream stands still")
    assert spoilt.plays == 3


def test_search_reports_drawn_case_when_violation_ends_search() -> None:
    class Stuck(Adder):
        """Breaks every program after the first that breaks."""

        def play(self, prop: Property, case: Case) -> None:
            if self.broke_at is not None:
                raise Violation("O1", "stands still")
            try:
                super().play(prop, case)
            except Violation as violation:
                violation.ends_search = True
                raise

    stuck = Stuck()
    verdict = search(SUMS, stuck, SearchSettings(cases=100))
    assert isinstance(verdict, PropertyViolated)
    assert verdict.what == "O1: too much"
    assert stuck.broke_at == stuck.plays
