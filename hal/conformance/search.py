"""Looks for a case in which a property does not hold, and shrinks it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st

from equipoise.hal.conformance.program import Case
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.conformance.subject import Subject, missing
from equipoise.hal.errors import Violation

SCHEDULE = 48
"""Choices that are drawn; whatever comes after them is eager."""


@dataclass(frozen=True)
class Held:
    """No case broke it."""

    cases: int


@dataclass(frozen=True)
class Violated:
    """The smallest case found that breaks it."""

    clause: str
    what: str
    case: Case
    cases: int


@dataclass(frozen=True)
class Undeclared:
    """It was not tried: the subject does not declare what it needs."""

    capability: str


Verdict = Held | Violated | Undeclared


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How hard to look.

    Attributes:
        cases: how many to try.
        seed: what the draws start from.
        shrinking: seconds that may go into shrinking a case; 0 reports it as drawn.
    """

    cases: int
    seed: int = 0
    shrinking: float = 10.0


@dataclass
class _Trial:
    """Plays cases, and keeps a verdict for each, so that a race stays as it was seen first."""

    claim: Property
    subject: Subject
    effort: Effort
    played: int = 0
    broken: dict[Case, Violation] = field(default_factory=dict)
    found_at: float | None = None

    def play(self, case: Case) -> None:
        if case in self.broken:
            raise self.broken[case]
        if self.found_at is not None and time.monotonic() > self.found_at + self.effort.shrinking:
            return  # no more time to shrink: only what is known to break counts
        self.played += 1
        try:
            self.subject.play(self.claim, case)
        except Violation as violation:
            self.broken[case] = violation
            self.found_at = self.found_at or time.monotonic()
            raise


def search(claim: Property, subject: Subject, effort: Effort) -> Verdict:
    """Try `effort.cases` cases; the smallest one that breaks the property, if any does."""
    lacking = missing(claim, subject.traits)
    if lacking is not None:
        return Undeclared(lacking)
    trial = _Trial(claim, subject, effort)
    test = _test(trial, cases(claim, subject.traits), effort)
    try:
        test()
    except Violation as violation:
        case = next(case for case, known in trial.broken.items() if known is violation)
        return Violated(violation.clause, str(violation), case, trial.played)
    return Held(trial.played)


def cases(claim: Property, traits: Traits) -> st.SearchStrategy[Case]:
    """Programs, with a schedule for executors that follow one, or that disturb by it."""
    return st.builds(Case, claim.programs(traits), st.binary(max_size=SCHEDULE))


def _test(trial: _Trial, drawn: st.SearchStrategy[Case], effort: Effort) -> Callable[[], None]:
    shrink = {Phase.shrink} if effort.shrinking else set()

    @seed(effort.seed)
    @settings(
        max_examples=effort.cases,
        database=None,
        deadline=None,
        phases={Phase.generate, *shrink},
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
    )
    @given(drawn)
    def test(case: Case) -> None:
        trial.play(case)

    return test
