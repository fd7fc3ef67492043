"""Looks for a case in which a property does not hold, and shrinks it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from equipoise.hal.conformance.fixtures.strategies import MAX_STEERED_CHOICES, schedules
from equipoise.hal.conformance.program import Case
from equipoise.hal.conformance.property import ProgramStrategy, Property, StatefulPrograms
from equipoise.hal.conformance.subject import Subject, missing_capability
from equipoise.hal.errors import Violation

RULES = 20
"""Rules that a machine applies to compose one program."""
LARGE_CASES_DIVISOR = 60
"""A property with the sizes of a real model gets this many times fewer cases."""
MIN_LARGE_CASES = 2
"""Cases of such a property, unless fewer are asked for."""


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
    """The smallest case found that breaks it."""

    clause: str
    what: str
    case: Case
    cases: int


@dataclass(frozen=True)
class PropertyUnsupported:
    """It was not tried: the subject does not declare what it needs."""

    capability: str


Verdict = PropertyHeld | PropertyReported | PropertyViolated | PropertyUnsupported


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """How many cases to play.

    Attributes:
        cases: how many to try.
        seed: what the draws start from.
        max_shrinks: plays that may go into shrinking a case; 0 reports it as drawn. Plays and not
            seconds, so that a busy machine reports the same program as an idle one.
    """

    cases: int
    seed: int = 0
    max_shrinks: int = 1000


@dataclass
class _Trial:
    """Plays cases, and keeps a verdict for each, so that a race stays as it was seen first."""

    claim: Property
    subject: Subject
    effort: SearchSettings
    played: int = 0
    waited: int = 0
    broken: dict[Case, Violation] = field(default_factory=dict)
    found_at: int | None = None
    over: bool = False
    figure: str | None = None

    def play(self, case: Case) -> None:
        if case in self.broken:
            raise self.broken[case]
        spent = self.played + self.waited
        shrunk = self.found_at is not None and spent >= self.found_at + self.effort.max_shrinks
        if shrunk or self.over:
            return  # only what is known to break counts
        self.played += 1
        try:
            self.figure = self.subject.play(self.claim, case)
        except Violation as violation:
            self.broken[case] = violation
            if self.found_at is None:
                self.found_at = self.played
            else:
                self.waited += violation.plays - 1
            self.over = violation.ends_search
            raise


def search(prop: Property, subject: Subject, effort: SearchSettings) -> Verdict:
    """Try `effort.cases` cases; the smallest one that breaks the property, if any does."""
    lacking = missing_capability(prop, subject.traits)
    if lacking is not None:
        return PropertyUnsupported(lacking)
    trial = _Trial(prop, subject, _fewer(effort) if prop.large else effort)
    test = _test(trial, prop.programs)
    try:
        test()
    except Violation as violation:
        case = next(case for case, error in trial.broken.items() if error is violation)
        return PropertyViolated(violation.clause, str(violation), case, trial.played)
    return PropertyHeld(trial.played) if trial.figure is None else PropertyReported(trial.figure)


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
