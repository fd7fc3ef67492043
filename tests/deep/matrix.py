"""Plays every property of the conformance suite on every mutant: `python -m deep.matrix`.

Writes which properties reject which mutant. Those of the CPU and gloo, on real threads, are played
by their own property only. The exit code is 1 where a mutant is not rejected by its own property,
or is rejected by one that it does not declare (`Mutant.also`). Two processes share the mutants.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from conformance.mutants.collection import mutants
from conformance.mutants.mutant import Mutant
from helpers.tiers import DEEP

from equipoise.hal.conformance import suite
from equipoise.hal.conformance.search import PropertyViolated, SearchSettings, search

CASES = 2000
"""Of the property that has to reject a mutant."""
OTHERS = 40 if DEEP else 4
"""Of every other property."""
SEED = 1
EXAMPLE = "a-wait-is-not-heard"
"""The mutant whose violation docs/conformance.md quotes."""
Row = dict[str, Any]


def mutant_of(name: str) -> Mutant:
    """The mutant of that name."""
    return next(mutant for mutant in mutants() if mutant.name == name)


def judged(name: str, others: int = OTHERS) -> tuple[Row, list[str]]:
    """Which properties reject the mutant of that name, and its violation in lines."""
    mutant = mutant_of(name)
    with closing(mutant.subject()) as subject:
        found = search(suite.find(mutant.property), subject, SearchSettings(cases=CASES, seed=SEED))
    quick = SearchSettings(cases=others, seed=SEED, max_shrinks=0)
    rejecting = [mutant.property] if isinstance(found, PropertyViolated) else []
    for prop in suite.properties():
        if mutant.real or prop.name == mutant.property:
            continue
        tried = mutant.subject()
        if prop.applies_to(tried.traits) and isinstance(
            search(prop, tried, quick), PropertyViolated
        ):
            rejecting.append(prop.name)
    row: Row = {"mutant": name, "rejected by": " ".join(rejecting)}
    if not isinstance(found, PropertyViolated):
        return row, []
    program, schedule = found.case.program, found.case.schedule
    row["steps"] = len(program.steps)
    return row, [found.what, "", *program.lines(), f"schedule {schedule.hex(' ')}"]


def problems(row: Row) -> Iterator[str]:
    """What is wrong with a row."""
    mutant = mutant_of(row["mutant"])
    rejecting = row["rejected by"].split()
    if mutant.property not in rejecting:
        yield f"{mutant.name} lives: {mutant.property} does not reject it"
    if undeclared := set(rejecting) - {mutant.property, *mutant.also}:
        yield f"{mutant.name}: rejected by {', '.join(sorted(undeclared))}, which it does not name"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m deep.matrix", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows by table there")
    parser.add_argument("--only", nargs="+", metavar="MUTANT", help="these mutants")
    chosen = parser.parse_args(arguments)
    names = chosen.only or [mutant.name for mutant in mutants()]
    rows: list[Row] = []
    wrong: list[str] = []
    example: list[str] = []
    with ProcessPoolExecutor(2) as pool:
        for row, violation in pool.map(judged, names):
            rows.append(row)
            wrong += problems(row)
            print(f"{row['mutant']}: rejected by {row['rejected by']}", flush=True)
            if row["mutant"] == EXAMPLE:
                example = violation
    if chosen.json:
        tables = {"mutants": rows, "violation": [{"line": line} for line in example]}
        chosen.json.write_text(json.dumps(tables), "utf-8")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
