"""The suite rejects every mutant, for the reason it should, and each property is needed."""

from collections import Counter
from contextlib import closing
from functools import cache

import pytest
from conformance.mutants.collection import mutants
from conformance.mutants.mutant import Mutant
from conformance.smoke import smoke

from equipoise.hal.conformance import suite
from equipoise.hal.conformance.search import PropertyHeld, PropertyViolated, SearchSettings, search

CASES = 2000
"""Enough for any mutant with near certainty: the rarest takes 150 on average, and what hypothesis
draws from a seed changes with the constants of the modules that are imported. The search ends with
the first violation, so most mutants take a few."""
REAL_CASES = 100
"""Of a mutant on real threads, which costs more a case. It is reported as drawn: shrinking one that
hangs would take minutes."""
MAX_STEPS = 8
LEAST, LEAST_REAL = 40, 70
SEED = 1
SIGNATURES = "every-object-has-the-signatures-of-its-protocol"
MUTANTS = mutants()
each_mutant = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


@cache
def verdict_on(mutant: Mutant) -> PropertyViolated | PropertyHeld:
    effort = SearchSettings(cases=CASES, seed=SEED)
    if mutant.real:
        effort = SearchSettings(cases=REAL_CASES, seed=SEED, max_shrinks=0)
    with closing(mutant.subject()) as subject:
        verdict = search(suite.find(mutant.property), subject, effort)
    assert isinstance(verdict, PropertyViolated | PropertyHeld), (
        f"{mutant.name} is not even tried: {verdict}"
    )
    return verdict


@each_mutant
def test_mutant_is_rejected_for_its_clause(
    mutant: Mutant,
) -> None:
    found = verdict_on(mutant)
    assert isinstance(found, PropertyViolated), f"{mutant.name} lives: {mutant.broken}"
    assert found.clause == mutant.clause, found.what


@each_mutant
def test_mutant_violation_is_shrunk_to_short_program(mutant: Mutant) -> None:
    verdict = verdict_on(mutant)
    assert isinstance(verdict, PropertyViolated)
    assert len(verdict.case.program.steps) <= MAX_STEPS, verdict.case.program.lines()


@each_mutant
def test_mutant_passes_smoke_program(mutant: Mutant) -> None:
    with closing(mutant.subject()) as subject:
        smoke(subject)


@pytest.mark.parametrize(
    "mutant", [m for m in MUTANTS if m.property != SIGNATURES], ids=lambda mutant: mutant.name
)
def test_mutant_keeps_healthy_signatures(mutant: Mutant) -> None:
    with closing(mutant.subject()) as subject:
        verdict = search(suite.find(SIGNATURES), subject, SearchSettings(cases=1))
    assert isinstance(verdict, PropertyHeld), verdict


def test_every_property_has_a_mutant() -> None:
    properties_with_mutant = {mutant.property for mutant in MUTANTS}
    assert {
        prop.name for prop in suite.properties()
    } - REPORTED_PROPERTIES - properties_with_mutant == set()


def test_every_judged_clause_has_a_mutant() -> None:
    clauses_with_mutant = {mutant.clause for mutant in MUTANTS}
    assert sorted(set(suite.clauses()) - clauses_with_mutant - REPORTED_CLAUSES) == []


def test_mutants_are_numerous_and_unique() -> None:
    assert len(MUTANTS) >= LEAST
    assert sum(mutant.real for mutant in MUTANTS) >= LEAST_REAL
    assert [name for name, count in Counter(m.name for m in MUTANTS).items() if count > 1] == []


REPORTED_PROPERTIES = {claim.name for claim in suite.properties() if claim.clauses == ("T1",)}
REPORTED_CLAUSES = {"T1"}
"""Measured and printed, never asserted: no mutant can break it."""
