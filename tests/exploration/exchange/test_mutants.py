"""The interleavings reject every broken exchange, for the reason they should."""

from dataclasses import replace

import pytest
from exploration.exchange.case import PLAIN
from exploration.exchange.mutants.collection import mutants
from exploration.exchange.mutants.mutant import Mutant
from exploration.exchange.run_case import play
from exploration.exchange.search import search

pytestmark = pytest.mark.timeout(900)
BUDGET = 1_000
"""Cases at most."""
MUTANTS = mutants()
INNOCENT = replace(PLAIN, steps=[[[[[0, 3], [2, 5], [1, 4]], [[4, 1], [0, 2]], [[1, 4]]]]])
"""One batch that does not fill a message; nobody is late."""
each_mutant = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


@each_mutant
def test_exchange_mutant_is_rejected_by_its_property(mutant: Mutant) -> None:
    violations = search(mutant.patches, mutant.property, BUDGET)
    assert mutant.property in violations, f"{mutant.name} lives: {mutant.broken}"


@each_mutant
def test_exchange_mutant_passes_innocent_case(mutant: Mutant) -> None:
    assert play(INNOCENT, mutant.patches) == {}
