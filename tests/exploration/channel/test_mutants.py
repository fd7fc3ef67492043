"""The exploration rejects every broken channel, for the reason it should."""

import pytest
from exploration.channel.case import Case
from exploration.channel.mutants import MUTANTS, Mutant
from exploration.channel.oracle import PROPERTIES, violations
from exploration.channel.play import play
from exploration.channel.search import broken_by

pytestmark = pytest.mark.timeout(900)
BUDGET = 1_500
each_mutant = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


@each_mutant
def test_the_property_of_a_mutant_rejects_it(mutant: Mutant) -> None:
    assert mutant.property in broken_by(mutant, BUDGET), f"{mutant.name} lives: {mutant.broken}"


def test_a_case_without_bytes_is_innocent() -> None:
    assert violations(Case(), play(Case())) == {}


def test_every_property_is_the_one_that_rejects_some_mutant() -> None:
    assert {mutant.property for mutant in MUTANTS} == set(PROPERTIES)
