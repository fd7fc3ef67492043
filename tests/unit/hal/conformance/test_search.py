"""How a violation is shrunk: bounded by plays, whatever the clock says."""

import itertools
import time
from collections.abc import Callable

import pytest
from hypothesis import strategies as st

from equipoise.hal.capabilities import Capabilities
from equipoise.hal.conformance.context import Play, RankContext
from equipoise.hal.conformance.program import Case, Program, Step, make_program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.conformance.search import PropertyViolated, SearchSettings, search
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

    def __init__(
        self, passing: Callable[[], object] = lambda: None, plays_of_violation: int = 1
    ) -> None:
        self.plays = 0
        self.violations = 0
        self._plays_of_violation = plays_of_violation
        self.broke_at: int | None = None
        self._passing = passing

    def play(self, prop: Property, case: Case) -> None:
        self.plays += 1
        self._passing()
        if sum(int(step.args[0]) for step in case.program.steps) >= LEAST:
            self.broke_at = self.broke_at or self.plays
            self.violations += 1
            violation = Violation("O1", "too much")
            violation.plays = self._plays_of_violation
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


def test_shrinking_counts_violation_that_waited_as_many_plays() -> None:
    """Each waits for a deadline: the first is for free, then four of 25 are a hundred."""
    adder = Adder(plays_of_violation=25)
    verdict = search(SUMS, adder, SearchSettings(cases=100, max_shrinks=100))
    assert isinstance(verdict, PropertyViolated)
    assert 1 < adder.violations <= 1 + 4
    quick = Adder()
    search(SUMS, quick, SearchSettings(cases=100, max_shrinks=100))
    assert quick.violations > adder.violations


@pytest.mark.parametrize("plays", [0, 1, 10])
def test_shrinking_takes_at_most_the_given_number_of_plays(plays: int) -> None:
    adder = Adder()
    verdict = search(SUMS, adder, SearchSettings(cases=100, max_shrinks=plays))
    assert isinstance(verdict, PropertyViolated)
    assert adder.broke_at is not None
    assert adder.plays <= adder.broke_at + plays
    assert verdict.cases == adder.plays


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
