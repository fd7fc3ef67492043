"""The interleavings reject every broken exchange, for the reason they should."""

from collections import Counter
from dataclasses import replace

import pytest
from exploration.exchange.case import PLAIN
from exploration.exchange.mutants.collection import mutants
from exploration.exchange.mutants.mutant import Mutant
from exploration.exchange.play import play
from exploration.exchange.search import search
from helpers.paths import ROOT

pytestmark = pytest.mark.timeout(900)
BUDGET = 1_000
"""Cases at most."""
MUTANTS = mutants()
INNOCENT = replace(PLAIN, steps=[[[[[0, 3], [2, 5], [1, 4]], [[4, 1], [0, 2]], [[1, 4]]]]])
"""One batch that does not fill a message; nobody is late."""
PAGE = ROOT / "docs" / "design" / "exchange.md"
each_mutant = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


@each_mutant
def test_the_property_of_a_mutant_rejects_it(mutant: Mutant) -> None:
    found = search(mutant.patches, mutant.property, BUDGET)
    assert mutant.property in found, f"{mutant.name} lives: {mutant.broken}"


def test_the_healthy_exchange_survives_the_same_search() -> None:
    assert search({}, "dense", 50) == {}


def test_no_mutant_is_there_twice() -> None:
    assert [name for name, n in Counter(m.name for m in MUTANTS).items() if n > 1] == []


@each_mutant
def test_a_mutant_survives_innocent_use(mutant: Mutant) -> None:
    assert play(INNOCENT, mutant.patches) == {}


def test_the_design_page_lists_every_mutant_and_who_rejects_it() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = [f"| `{m.name}` | {m.broken} | {m.property} |" for m in MUTANTS]
    assert [row for row in rows if row not in text] == []
    assert text.partition("| mutant |")[2].count("\n| `") == len(MUTANTS)
