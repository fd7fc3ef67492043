"""Reads and writes counts as CSV with the columns layer, expert, count and optionally window."""

import csv
import re
from collections import Counter
from collections.abc import Mapping
from io import StringIO
from itertools import product
from pathlib import Path

import numpy as np

from equipoise.balancer.formats.files import read_text
from equipoise.balancer.formats.numbers import MAX_LAYERS, parse_integer, short_repr
from equipoise.balancer.formats.statistics import ExpertStatistics
from equipoise.hal.errors import FormatError, PlacementError

COUNT = "count"
COLUMNS = "window", "layer", "expert", COUNT
INTEGER_PATTERN = re.compile(r"[+-]?[0-9]+")
MAX_NUMBER_CHARS = 4096
"""Upper limit of a number's length: `int` takes quadratic time in the number of digits."""


def decode_csv(path: Path, data: bytes) -> dict[str, object]:
    """Decodes columns by name, each a list of integers. Raises `FormatError` with the line."""
    reader = csv.reader(StringIO(read_text(path, data), newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        if sorted(header) not in (sorted(COLUMNS), sorted(COLUMNS[1:])):
            raise FormatError(
                str(path), f"begins with {short_repr(header)}, not layer,expert,count"
            )
        columns: dict[str, list[int]] = {name: [] for name in header}
        for row in filter(None, reader):
            if len(row) != len(header):
                raise FormatError(
                    str(path), f"line {reader.line_num} has {len(row)} columns of {len(header)}"
                )
            for name, value in zip(header, row, strict=True):
                number = _parse_number(path, reader.line_num, name, value)
                if name == "layer" and number >= MAX_LAYERS:  # raised here, where the line is known
                    problem = f"line {reader.line_num}: layer {number} is above {MAX_LAYERS - 1}"
                    raise FormatError(str(path), problem)
                columns[name].append(number)
    except csv.Error as error:
        raise FormatError(str(path), f"line {reader.line_num} is not CSV: {error}") from None
    return {**columns}


def unpack(path: Path, fields: Mapping[str, object]) -> ExpertStatistics:
    """Builds statistics from rows in any order, one per window, layer and expert.

    Raises `FormatError`.
    """
    columns = {name: column for name, column in fields.items() if isinstance(column, list)}
    rows = len(columns[COUNT])
    table: dict[str, list[int]] = {"window": [0] * rows, **columns}
    windows, layers = (sorted(set(table[axis])) for axis in ("window", "layer"))
    experts = max(table["expert"], default=-1) + 1
    expected = len(windows) * len(layers) * experts
    if not rows:
        raise FormatError(str(path), "has no counts")
    if min(map(min, (table[axis] for axis in COLUMNS[:3]))) < 0:
        raise FormatError(str(path), "numbers a window, layer or expert below 0")
    if windows[-1] != windows[0] + len(windows) - 1:
        raise FormatError(str(path), f"has no rows of some window after {windows[0]}")
    _check_complete(path, table, expected)
    order = np.lexsort([table["expert"], table["layer"], table["window"]])
    counts = np.array(table[COUNT], dtype=np.int64)[order]
    return ExpertStatistics(
        counts.reshape(len(windows), len(layers), experts),
        tuple(layers),
        first_iteration=windows[0] if "window" in columns else None,
    )


def encode_csv(statistics: ExpertStatistics) -> bytes:
    """Encodes a .csv file; the column `window` is left out for a single unnumbered window."""
    first = statistics.first_iteration
    numbered = statistics.windows > 1 or first is not None
    lines = [",".join(COLUMNS if numbered else COLUMNS[1:])]
    for window, layers in enumerate(statistics.counts.tolist(), first or 0):
        for layer, counts in zip(statistics.layers, layers, strict=True):
            lead = f"{window},{layer}" if numbered else str(layer)
            lines += [f"{lead},{expert},{count}" for expert, count in enumerate(counts)]
    return ("\n".join(lines) + "\n").encode()


def _parse_number(path: Path, line: int, name: str, value: str) -> int:
    try:
        text = value.strip()
        if len(text) > MAX_NUMBER_CHARS or "_" in text:  # `int` would ignore underscores
            raise ValueError(text)
        return parse_integer(name, int(text) if INTEGER_PATTERN.fullmatch(text) else float(text))
    except (ValueError, PlacementError):
        problem = f"line {line}: {name} is {short_repr(value)}, not a whole number"
        raise FormatError(str(path), problem) from None


def _check_complete(path: Path, table: dict[str, list[int]], expected: int) -> None:
    keys = list(zip(table["window"], table["layer"], table["expert"], strict=True))
    unique_keys = set(keys)
    if len(unique_keys) != len(keys):
        window, layer, expert = next(key for key, times in Counter(keys).items() if times > 1)
        problem = f"layer {layer}, expert {expert} of window {window} is given twice"
        raise FormatError(str(path), problem)
    if len(unique_keys) == expected:
        return
    axes = (sorted(set(table["window"])), sorted(set(table["layer"])))
    for window, layer in product(*axes):
        # Ends early however large the largest expert is: there are more experts than rows.
        for expert in range(max(table["expert"]) + 1):
            if (window, layer, expert) not in unique_keys:
                problem = f"layer {layer} of window {window} has no count of expert {expert}"
                raise FormatError(str(path), problem)
