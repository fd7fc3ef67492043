"""The exploration rejects every broken engine, for the reason it should."""

import logging
from collections.abc import Iterator
from functools import cache

import pytest
from exploration.engine.mutants.collection import mutants
from exploration.engine.mutants.mutant import Mutant
from exploration.engine.oracle import PROPERTIES
from exploration.engine.search import Search
from exploration.engine.smoke import smoke

pytestmark = pytest.mark.timeout(900)
BUDGET = 400
"""Cases at most: what every commit explores of the healthy engine."""
MUTANTS = mutants()
each_mutant = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


@pytest.fixture(autouse=True)
def _unlogged() -> Iterator[None]:
    """Each planted fault would be told."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@cache
def searched(mutant: Mutant) -> Search:
    return Search(mutant.patches, mutant.property, mutant.reaches).run(BUDGET)


@each_mutant
def test_the_property_of_a_mutant_rejects_it(mutant: Mutant) -> None:
    found = searched(mutant)
    assert mutant.property in found.broken, f"{mutant.name} lives: {mutant.broken}"


@each_mutant
def test_a_mutant_survives_innocent_use(mutant: Mutant) -> None:
    assert smoke(mutant.patches) == {}


def test_every_property_is_the_one_that_rejects_some_mutant() -> None:
    assert {mutant.property for mutant in MUTANTS} == set(PROPERTIES)
