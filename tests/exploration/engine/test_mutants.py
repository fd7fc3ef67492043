"""The exploration rejects every broken engine, for the reason it should."""

import logging
from collections.abc import Iterator
from functools import cache

import pytest
from exploration.engine.innocent_cases import smoke
from exploration.engine.mutants.collection import mutants
from exploration.engine.mutants.mutant import Mutant
from exploration.engine.oracle import PROPERTIES
from exploration.engine.search import Search

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
def test_engine_mutant_is_rejected_by_its_property(mutant: Mutant) -> None:
    result = searched(mutant)
    assert mutant.property in result.broken, f"{mutant.name} lives: {mutant.broken}"


@each_mutant
def test_engine_mutant_passes_innocent_cases(mutant: Mutant) -> None:
    assert smoke(mutant.patches) == {}


def test_engine_properties_each_reject_a_mutant() -> None:
    assert {mutant.property for mutant in MUTANTS} == set(PROPERTIES)
