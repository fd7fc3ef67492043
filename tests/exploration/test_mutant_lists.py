"""The lists of mutants of the three explorations, and the design pages that show them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from exploration.channel.mutants import MUTANTS as CHANNEL
from exploration.engine.mutant_table import row
from exploration.engine.mutants.collection import mutants as engine_mutants
from exploration.engine.oracle import PROPERTIES
from exploration.exchange.mutants.collection import mutants as exchange_mutants
from helpers.paths import ROOT


@dataclass(frozen=True)
class MutantList:
    """What an exploration rejects, and how its design page shows it.

    Attributes:
        page: its name below docs/design.
        names: of the mutants.
        rows: of the page's table, one a mutant.
        heading: what stands above the table, or nothing where the whole page is searched.
        others: rows of other tables that the page has there.
    """

    page: str
    names: Sequence[str]
    rows: Sequence[str]
    heading: str = ""
    others: int | None = None


ENGINE, EXCHANGE = engine_mutants(), exchange_mutants()
LISTS = {
    "channel": MutantList(
        "stage-overlap.md",
        [m.name for m in CHANNEL],
        [f"| `{m.name}` | {m.broken} | `{m.property}` |" for m in CHANNEL],
    ),
    "engine": MutantList(
        "engine-exploration.md",
        [m.name for m in ENGINE],
        [row(m) for m in ENGINE],
        others=len(PROPERTIES),
    ),
    "exchange": MutantList(
        "exchange.md",
        [m.name for m in EXCHANGE],
        [f"| `{m.name}` | {m.broken} | {m.property} |" for m in EXCHANGE],
        heading="| mutant |",
        others=0,
    ),
}
each_list = pytest.mark.parametrize("mutant_list", LISTS.values(), ids=LISTS)


@each_list
def test_exploration_mutant_names_are_unique(mutant_list: MutantList) -> None:
    assert [name for name, count in Counter(mutant_list.names).items() if count > 1] == []


@each_list
def test_design_page_lists_every_mutant_and_who_rejects_it(mutant_list: MutantList) -> None:
    text = (ROOT / "docs" / "design" / mutant_list.page).read_text(encoding="utf-8")
    assert [row for row in mutant_list.rows if row not in text] == []
    if mutant_list.others is not None:
        below = text.partition(mutant_list.heading)[2] if mutant_list.heading else text
        assert below.count("\n| `") == len(mutant_list.rows) + mutant_list.others
