"""Rows that a test adds to the tables of docs/deep-results.md, through its JUnit report.

`tox -e deep` collects them. Rows of a table that differ only in cells that are lists become one.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

RecordProperty = Callable[[str, object], None]
"""pytest's fixture `record_property`."""
PREFIX = "table: "
"""A property of a JUnit report whose name begins so holds the cells of one row as JSON."""


def add_row(record_property: RecordProperty, table: str, cells: Mapping[str, object]) -> None:
    """Add a row to a table; `cells` are strings, numbers, or lists of strings, by column."""
    record_property(PREFIX + table, json.dumps(dict(cells)))


def add_clauses(
    record_property: RecordProperty, backend: str, command: Sequence[str], verdicts: Path
) -> None:
    """Add what `equipoise conformance --json` wrote as a column of docs/conformance-matrix.md.

    Clauses are kept by status, each status one string: `{"held": "O1 O2", "unsupported": "A10"}`.
    """
    report = json.loads(verdicts.read_text("utf-8"))
    status: dict[str, list[str]] = {}
    for clause, verdict in report["clauses"].items():
        status.setdefault(verdict["status"], []).append(clause)
    cells = {
        "backend": backend,
        "command": typed(command),
        "cases": sum(claim.get("cases", 0) for claim in report["properties"]),
        **{name: " ".join(clauses) for name, clauses in status.items()},
    }
    add_row(record_property, "clauses", cells)


def typed(command: Sequence[str]) -> str:
    """A command as somebody would type it."""
    words = [Path(word).name if word.startswith("/") else word for word in command]
    text = shlex.join("python" if word.startswith("python3") else word for word in words)
    return text.replace("python -m equipoise", "equipoise")
