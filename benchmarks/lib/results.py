"""Files of figures: benchmarks/results/NAME.json, with the command, commit and machine of each.

A file holds `figures`, single values by name, and `tables`, lists of rows by name; each is a line.
A value that was measured several times is `[median, least, most]`; a mean with the half width of
its 95 % confidence interval is `[mean, half]`. `was` is the name that a script had at the commit of
its figures, where it had another.
"""

import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DIGITS = 9
"""Significant digits of a stored number."""
Row = dict[str, Any]


def spread(values: Iterable[float], times: float = 1.0) -> list[float]:
    """[median, least, most], each multiplied by `times`."""
    scaled = [value * times for value in values]
    return [statistics.median(scaled), min(scaled), max(scaled)]


def commit() -> str:
    """Short name of the commit that is measured, with `+` when the code differs from it."""
    name = _git("rev-parse", "--short", "HEAD")
    code = (".", ":!benchmarks/results", ":!docs", ":!*.md")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *code)
    return name + ("+" if changed else "")


def save(
    name: str,
    command: Sequence[str],
    figures: Mapping[str, Any],
    tables: Mapping[str, Sequence[Row]] | None = None,
) -> Path:
    """Write benchmarks/results/NAME.json with what it was measured by."""
    from equipoise.machine import describe_machine  # reading results takes no package

    head = {"command": shlex.join(command), "commit": commit(), "machine": describe_machine()}
    path = RESULTS / f"{name}.json"
    RESULTS.mkdir(exist_ok=True)
    path.write_text(dumps(head, figures, tables or {}))
    sys.stderr.write(f"figures: {path.relative_to(ROOT)}\n")
    return path


def dumps(
    head: Mapping[str, Any], figures: Mapping[str, Any], tables: Mapping[str, Sequence[Row]]
) -> str:
    """JSON with one figure, and one row of a table, per line."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    figure_lines = [f"{json.dumps(key)}: {_line(value)}" for key, value in figures.items()]
    lines.append('"figures": {\n' + ",\n".join(figure_lines) + "\n}")
    table_lines = [
        f"{json.dumps(key)}: [\n" + ",\n".join(map(_line, rows)) + "\n]"
        for key, rows in tables.items()
    ]
    lines.append('"tables": {\n' + ",\n".join(table_lines) + "\n}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def load(name: str) -> dict[str, Any] | None:
    """The contents of a file of figures; None where nothing was measured."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def source(contents: Mapping[str, Any]) -> str:
    """Command, commit and machine of saved figures, in one line."""
    machine = contents["machine"]
    was = f" (there `{contents['was']}`)" if "was" in contents else ""
    return (
        f"`{contents['command']}` at commit {contents['commit']}{was}, on {machine['processor']}, "
        f"{machine['cores']} cores, {machine['memory']}, Python {machine['python']}, "
        f"torch {machine['torch']}, numpy {machine['numpy']}."
    )


def _line(value: Any) -> str:
    return json.dumps(_rounded(value))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return value


def _git(*arguments: str) -> str:
    result = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return result.stdout.strip() if result.returncode == 0 else "unknown"
