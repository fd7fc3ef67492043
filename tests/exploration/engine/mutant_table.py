"""Measures the design page's table of mutants: `python -m exploration.engine.mutant_table`."""

import logging
from collections.abc import Iterator

from exploration.engine.mutants.collection import mutants
from exploration.engine.mutants.mutant import Mutant
from exploration.engine.search import Search

HEAD = "| Mutant | What it does instead | Property | Cases | Others that saw it by then |"
MOST = 2_000


def row(mutant: Mutant) -> str:
    """What the page says of a mutant, without what was measured."""
    return f"| `{mutant.name}` | {mutant.broken} | {mutant.property} |"


def rows() -> Iterator[str]:
    """The table, line by line."""
    yield HEAD
    yield "|---|---|---|---|---|"
    for mutant in mutants():
        result = Search(mutant.patches, mutant.property, mutant.reaches).run(MOST)
        others = ", ".join(name for name in result.broken if name != mutant.property)
        yield f"{row(mutant)} {result.played} | {others} |"


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    for line in rows():
        print(line)
