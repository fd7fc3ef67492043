"""The exploration rejects every broken channel, for the reason it should."""

import pytest
from exploration.channel.case import Case
from exploration.channel.mutants import MUTANTS, Mutant
from exploration.channel.oracle import PROPERTIES, violations
from exploration.channel.run_case import play
from exploration.channel.search import broken_by

pytestmark = pytest.mark.timeout(900)
BUDGET = 1_500
each_mutant = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


@each_mutant
def test_channel_mutant_is_rejected_by_its_property(mutant: Mutant) -> None:
    assert mutant.property in broken_by(mutant, BUDGET), f"{mutant.name} lives: {mutant.broken}"


def test_channel_case_without_bytes_is_innocent() -> None:
    assert violations(Case(), play(Case())) == {}


def test_channel_properties_each_reject_a_mutant() -> None:
    assert {mutant.property for mutant in MUTANTS} == set(PROPERTIES)
