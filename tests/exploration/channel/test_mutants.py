"""The exploration rejects every broken channel, for the reason it should."""

from collections import Counter

import pytest
from exploration.channel.case import Case
from exploration.channel.mutants import MUTANTS, Mutant
from exploration.channel.oracle import PROPERTIES, violations
from exploration.channel.play import play
from exploration.channel.search import broken_by
from helpers.paths import ROOT

pytestmark = pytest.mark.timeout(900)
BUDGET = 1_500
PAGE = ROOT / "docs" / "design" / "stage-overlap.md"
each_mutant = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


@each_mutant
def test_the_property_of_a_mutant_rejects_it(mutant: Mutant) -> None:
    assert mutant.property in broken_by(mutant, BUDGET), f"{mutant.name} lives: {mutant.broken}"


def test_a_case_without_bytes_is_innocent() -> None:
    assert violations(Case(), play(Case())) == {}


def test_every_property_is_the_one_that_rejects_some_mutant() -> None:
    assert {mutant.property for mutant in MUTANTS} == set(PROPERTIES)


def test_no_mutant_is_there_twice() -> None:
    assert [name for name, count in Counter(m.name for m in MUTANTS).items() if count > 1] == []


def test_the_design_page_lists_every_mutant_and_who_rejects_it() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = [f"| `{m.name}` | {m.broken} | `{m.property}` |" for m in MUTANTS]
    assert [row for row in rows if row not in text] == []
