"""Looks for a case in which a property does not hold, and shrinks it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from equipoise.hal.conformance.fixtures.strategies import MAX_STEERED_CHOICES, schedules
from equipoise.hal.conformance.program import Case
from equipoise.hal.conformance.property import ProgramStrategy, Property, StatefulPrograms
from equipoise.hal.conformance.subject import NotJudgeable, Subject, missing_capability
from equipoise.hal.errors import ClosingFailed, Violation

RULES = 20
"""Rules that a machine applies to compose one program."""
LARGE_CASES_DIVISOR = 60
"""A property with the sizes of a real model gets this many times fewer cases."""
MIN_LARGE_CASES = 2
"""Cases of such a property, unless fewer are asked for."""
MAX_FLAKY_SEARCHES = 3
"""How often a search is begun again where a race was judged in two ways."""


@dataclass(frozen=True)
class PropertyHeld:
    """No case broke it."""

    cases: int


@dataclass(frozen=True)
class PropertyReported:
    """It is measured, not judged."""

    figure: str


@dataclass(frozen=True)
class PropertyViolated:
    """The smallest case found that breaks it.

    Attributes:
        clause: that it breaks.
        what: what was seen.
        case: the smallest one found.
        cases: how many were played.
        expired_plays: how many of them ended only when a long deadline had passed.
        only_closing: whether everything held but the closing of communicators afterwards.
    """

    clause: str
    what: str
    case: Case
    cases: int
    expired_plays: int = 0
    only_closing: bool = False


@dataclass(frozen=True)
class PropertyUnsupported:
    """It was not tried: the subject does not declare what it needs."""

    capability: str


@dataclass(frozen=True)
class PropertyNotJudged:
    """Nothing that it could show would mean anything: something else has to be repaired first."""

    reason: str


Verdict = (
    PropertyHeld | PropertyReported | PropertyViolated | PropertyUnsupported | PropertyNotJudged
)


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """How many cases to play.

    Attributes:
        cases: how many to try.
        seed: what the draws start from.
        max_shrinks: plays that may go into shrinking a case; 0 reports it as drawn. Plays and not
            seconds, so that a busy machine reports the same program as an idle one.
        max_expired_shrinks: plays among these that may end only when a long deadline has passed:
            each costs 15 to 135 s, and what it is shrunk to is seldom smaller than after a few.
    """

    cases: int
    seed: int = 0
    max_shrinks: int = 1000
    max_expired_shrinks: int = 4


@dataclass
class _Trial:
    """Plays cases, and keeps a verdict for each, so that a race stays as it was seen first."""

    claim: Property
    subject: Subject
    effort: SearchSettings
    played: int = 0
    expired_plays: int = 0
    violations: dict[Case, Violation] = field(default_factory=dict)
    held_cases: set[Case] = field(default_factory=set)
    found_at: int | None = None
    over: bool = False
    figure: str | None = None
    obstacle: str | None = None

    def play(self, case: Case) -> None:
        if case in self.violations:
            raise self.violations[case]
        if self.over or self._shrunk() or (self.violations and case in self.held_cases):
            return  # only what is known to break counts
        self.played += 1
        try:
            self.figure = self.subject.play(self.claim, case)
        except NotJudgeable as error:
            self.obstacle, self.over = str(error), True
            return
        except Violation as violation:
            self._note(case, violation)
            raise
        self.held_cases.add(case)

    def _note(self, case: Case, violation: Violation) -> None:
        self.violations[case] = violation
        self.expired_plays += violation.expired
        self.over = violation.ends_search
        if self.found_at is None:
            self.found_at = self.played

    def _shrunk(self) -> bool:
        """Whether no more plays may go into shrinking; the first violation is none of them."""
        if self.found_at is None:
            return False
        first = next(iter(self.violations.values()))
        expired_shrinks = self.expired_plays - first.expired
        return self.played >= self.found_at + self.effort.max_shrinks or (
            self.expired_plays > 0 and expired_shrinks >= self.effort.max_expired_shrinks
        )

    def violated(self, case: Case) -> PropertyViolated:
        violation = self.violations[case]
        return PropertyViolated(
            violation.clause,
            str(violation),
            case,
            self.played,
            self.expired_plays,
            isinstance(violation, ClosingFailed),
        )


def search(prop: Property, subject: Subject, effort: SearchSettings) -> Verdict:
    """Try `effort.cases` cases; the smallest one that breaks the property, if any does."""
    lacking = missing_capability(prop, subject.traits)
    if lacking is not None:
        return PropertyUnsupported(lacking)
    trial = _Trial(prop, subject, _fewer(effort) if prop.large else effort)
    case = _smallest_violation(trial, _test(trial, prop.programs))
    if case is not None:
        return trial.violated(case)
    if trial.obstacle is not None:
        return PropertyNotJudged(trial.obstacle)
    return PropertyHeld(trial.played) if trial.figure is None else PropertyReported(trial.figure)


def _smallest_violation(trial: _Trial, test: Callable[[], None]) -> Case | None:
    """The case to which a violation was shrunk, if there is one.

    Different draws may give the same case. Where it held for one of them and broke for the next, a
    race, hypothesis sees draws that do not repeat, and gives up. It begins again then: by now the
    case has one verdict, and what was played before the violation is not played again.
    """
    for _ in range(MAX_FLAKY_SEARCHES):
        try:
            test()
        except Violation as violation:
            return next(case for case, error in trial.violations.items() if error is violation)
        except Flaky:
            if not trial.violations:
                raise  # not a race of the subject: draws that depend on something else
            continue
        break
    return min(trial.violations, key=lambda case: len(case.program.steps), default=None)


def _fewer(effort: SearchSettings) -> SearchSettings:
    least = min(effort.cases, MIN_LARGE_CASES)
    return replace(effort, cases=max(least, effort.cases // LARGE_CASES_DIVISOR))


def _test(trial: _Trial, programs: ProgramStrategy | StatefulPrograms) -> Callable[[], None]:
    chosen, traits = _settings(trial.effort), trial.subject.traits
    if isinstance(programs, StatefulPrograms):
        composed = programs.new_machine

        def machine() -> RuleBasedStateMachine:
            return composed(traits, trial.play)

        seeded = cast(type[RuleBasedStateMachine], seed(trial.effort.seed)(machine))
        return lambda: run_state_machine_as_test(seeded, settings=chosen)

    choices = schedules(MAX_STEERED_CHOICES) if traits.steered else schedules()

    @seed(trial.effort.seed)
    @chosen
    @given(st.builds(Case, programs(traits), choices))
    def test(case: Case) -> None:
        trial.play(case)

    return test


def _settings(effort: SearchSettings) -> settings:
    shrink = {Phase.shrink} if effort.max_shrinks else set()
    return settings(
        max_examples=effort.cases,
        stateful_step_count=RULES,
        database=None,
        deadline=None,
        phases={Phase.generate, *shrink},
        suppress_health_check=cast(list[HealthCheck], list(HealthCheck)),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
    )
