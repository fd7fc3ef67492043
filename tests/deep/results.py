"""Results of `tox -e deep`: what each step found, by part, in tests/deep/results.json."""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.records import PREFIX

Row = dict[str, Any]
"""A step as it was run last: `step`, `command`, `commit`, `date`, `machine`, `outcome`, counts of
tests, seconds, and `tables`: rows of cells by table."""
Results = dict[str, list[Row]]
"""Rows by part."""
FILE = Path(__file__).with_name("results.json")
MAX_NAMES = 20
"""Failing tests that a row names."""
ENDS = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def load(path: Path = FILE) -> Results:
    """All results there are."""
    found: Results = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def save(results: Results, path: Path = FILE) -> None:
    """Write results, one line for each row of a table: a part that is run again changes few."""
    path.write_text(_text(results), "utf-8")


def merged(results: Results, part: str, row: Row) -> Results:
    """The same with one step of a part replaced or added."""
    kept = results.get(part, [])
    steps = [each["step"] for each in kept]
    if row["step"] in steps:
        rows = [row if each["step"] == row["step"] else each for each in kept]
    else:
        rows = [*kept, row]
    return {**results, part: rows}


def restricted(results: Results, part: str, steps: Iterable[str]) -> Results:
    """The same without rows of steps that the part does not have any more."""
    names = set(steps)
    return {**results, part: [row for row in results.get(part, []) if row["step"] in names]}


def from_junit(path: Path) -> Row:
    """Counts of tests by how they ended, names of those that failed, and rows of tables.

    Rows of a test that failed are left out.
    """
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failing: list[str] = []
    tables: dict[str, list[Row]] = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        ended = next((ENDS[child.tag] for child in case if child.tag in ENDS), "passed")
        counts[ended] += 1
        if ended == "failed":
            failing.append(f"{case.attrib.get('classname', '')}::{case.attrib['name']}")
        elif ended == "passed":
            for table, cells in _recorded(case):
                tables.setdefault(table, []).append(cells)
    row: Row = {**counts, "tables": {name: folded(rows) for name, rows in tables.items()}}
    return {**row, "failing": failing[:MAX_NAMES]} if failing else row


def folded(rows: Sequence[Row]) -> list[Row]:
    """Rows that differ only in cells that are lists as one row, with their lists joined."""
    found: dict[str, Row] = {}
    for row in rows:
        same = {name: cell for name, cell in row.items() if not isinstance(cell, list)}
        key = json.dumps(same, sort_keys=True) if same != row else f"row {len(found)}"
        known = found.setdefault(key, {name: same.get(name, []) for name in row})
        for name, cell in row.items():
            if isinstance(cell, list):
                known[name] = known.get(name, []) + cell
    return list(found.values())


def _recorded(case: ElementTree.Element) -> Iterable[tuple[str, Row]]:
    for each in case.iter("property"):
        if each.attrib["name"].startswith(PREFIX):
            yield each.attrib["name"].removeprefix(PREFIX), json.loads(each.attrib["value"])


def _text(results: Mapping[str, Sequence[Row]]) -> str:
    parts = (f"{_line(part)}: [{_rows(rows)}]" for part, rows in results.items())
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _rows(rows: Sequence[Row]) -> str:
    """Each row on a line, with its tables below it."""
    texts = []
    for row in rows:
        head = _line({name: cell for name, cell in row.items() if name != "tables"})
        tables = ",\n".join(map(_table, row.get("tables", {}), row.get("tables", {}).values()))
        below = ', "tables": {\n' + tables + "\n }" if tables else ""
        texts.append(f"\n {head[:-1]}{below}}}")
    return ",".join(texts)


def _table(name: str, rows: Sequence[Row]) -> str:
    return f"  {_line(name)}: [\n" + ",\n".join(f"   {_line(row)}" for row in rows) + "\n  ]"


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
