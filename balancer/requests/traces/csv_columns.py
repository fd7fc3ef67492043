"""Reads columns of numbers and times from CSV without quoting, block by block.

All rows of a block are parsed at once by numpy: with an object per field, a trace of twenty million
rows would take minutes, and hundreds of bytes per row. Times are as in `2023-11-16
18:15:46.6805900` and `2024-05-10 00:00:00+00:00`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from equipoise.balancer.formats.numbers import short_repr
from equipoise.balancer.requests.traces.trace_file import LineBlock, TraceFile
from equipoise.balancer.requests.workload import MAX_TOKENS, Counts
from equipoise.hal.errors import FormatError

Bytes: TypeAlias = npt.NDArray[np.uint8]
Flags: TypeAlias = npt.NDArray[np.bool_]
MAX_DIGITS = 18
"""Any number with this many digits fits into 64 bits."""
NANOSECONDS_PER_SECOND = 10**9
MAX_SECONDS = 9 * NANOSECONDS_PER_SECOND
"""285 years: fits into 64 bits as nanoseconds."""
NANO_DIGITS = 9
INTEGER = re.compile(r"-?[0-9]+")


@dataclass(frozen=True, eq=False)
class CsvColumn:
    """The n fields of a column in a block.

    Attributes:
        path: the file.
        name: the name in the header.
        data: uint8, the bytes of the block.
        begins: int64 [n], offsets in `data` at which the fields begin.
        ends: int64 [n], offsets at which they end.
        lines: int64 [n], their line numbers.
    """

    path: Path
    name: str
    data: Bytes
    begins: Counts
    ends: Counts
    lines: Counts

    def text(self, row: int) -> str:
        """Returns the text of a field."""
        return self.data[self.begins[row] : self.ends[row]].tobytes().decode(errors="replace")

    def require_all(self, good: Flags, expected: str) -> None:
        """Raises `FormatError` for the first row that is not good (bool [n])."""
        if not good.all():
            row = int(np.argmin(good))
            mismatch = f"{self.name} is {short_repr(self.text(row))}, expected {expected}"
            raise FormatError(str(self.path), f"line {self.lines[row]}: {mismatch}")

    def token_counts(self, least: int) -> Counts:
        """Parses token counts, int64 [n]. Raises `FormatError` for others, or out of range."""
        values, good = parse_digits(self.data, self.begins, self.ends)
        good &= (values >= least) & (values <= MAX_TOKENS)
        if not good.all():
            # The message differs for an integer out of range and for text that is no integer.
            integer = INTEGER.fullmatch(self.text(int(np.argmin(good))))
            kind = f"{least} to {MAX_TOKENS}" if integer else "a whole number"
            self.require_all(good, kind)
        return values

    def seconds_as_nanoseconds(self) -> Counts:
        """Parses decimal seconds to nanoseconds, int64 [n]; further digits are cut off.

        Raises `FormatError` for values outside 0 to `MAX_SECONDS`.
        """
        points = np.flatnonzero(self.data == ord("."))
        next_points = np.append(points, self.data.size)[np.searchsorted(points, self.begins)]
        splits = np.minimum(next_points, self.ends)
        whole, good = parse_digits(self.data, self.begins, splits)
        parts, fine = parse_fractions(self.data, splits, self.ends)
        self.require_all(good & fine & (whole <= MAX_SECONDS), f"seconds, 0 to {MAX_SECONDS}")
        return whole * NANOSECONDS_PER_SECOND + parts


def parse_digits(data: Bytes, begins: Counts, ends: Counts) -> tuple[Counts, Flags]:
    """Parses data[begins : ends], int64 [n]; also returns where it is 1 to `MAX_DIGITS` digits.

    The other values are undefined.
    """
    widths = ends - begins
    good = (widths > 0) & (widths <= MAX_DIGITS)
    values = np.zeros(widths.size, dtype=np.int64)
    for back in range(int(widths[good].max(initial=0))):
        inside = good & (back < widths)
        # A byte below "0" wraps around to above 9, so one comparison is enough.
        digit = data[np.where(inside, ends - 1 - back, 0)] - np.uint8(ord("0"))
        good &= ~inside | (digit <= 9)
        values += np.where(inside & good, digit, 0) * np.int64(10**back)
    return values, good


def parse_fractions(data: Bytes, begins: Counts, ends: Counts) -> tuple[Counts, Flags]:
    """Parses `.123` to nanoseconds and an empty field to 0, int64 [n]; also where it is either."""
    values, fine = parse_digits(data, begins + 1, ends)
    widths = ends - begins - 1
    # An empty field at the end of the data begins after its last byte, hence the minimum.
    fine &= data[np.minimum(begins, data.size - 1)] == ord(".")
    up, down = (
        10 ** np.clip(by, 0, NANO_DIGITS) for by in (NANO_DIGITS - widths, widths - NANO_DIGITS)
    )
    return np.where(fine, values * up // down, 0), fine | (ends == begins)


TIME_EXAMPLE = "a time such as 2024-05-10 00:00:00.009930+00:00"
SHORTEST_TIME = len("2024-05-10 00:00:00")
TIME_PARTS = (0, 4), (5, 2), (8, 2), (11, 2), (14, 2), (17, 2)
"""Offset and length of year, month, day, hour, minute and second."""
TIME_SEPARATORS = (4, b"-"), (7, b"-"), (10, b" T"), (13, b":"), (16, b":")
ZONE_CHARS = len("+00:00")
YEARS = 1970, 2200
"""Nanoseconds since 1970 of these years fit into 64 bits."""


def parse_timestamps(column: CsvColumn) -> Counts:
    """Parses times to nanoseconds since 1970, int64 [n]; UTC without a zone. Raises `FormatError`.

    The fraction may have up to 18 digits, or be left out if it is zero, as Python does.
    """
    column.require_all(column.ends - column.begins >= SHORTEST_TIME, TIME_EXAMPLE)
    zones, ends, zoned = _zones(column)
    parts, fine = parse_fractions(column.data, column.begins + SHORTEST_TIME, ends)
    seconds, real = _seconds(column)
    column.require_all(zoned & fine & real, TIME_EXAMPLE)
    return (seconds - zones) * NANOSECONDS_PER_SECOND + parts


def _seconds(column: CsvColumn) -> tuple[Counts, Flags]:
    """Returns seconds since 1970 without fraction and zone, and which times exist."""
    data, begins = column.data, column.begins
    time_parts = [parse_digits(data, begins + at, begins + at + size) for at, size in TIME_PARTS]
    good = np.logical_and.reduce([fine for _, fine in time_parts])
    for at, allowed in TIME_SEPARATORS:
        good &= np.isin(data[begins + at], np.frombuffer(allowed, dtype=np.uint8))
    year, month, day, hour, minute, second = (values for values, _ in time_parts)
    good &= (year >= YEARS[0]) & (year < YEARS[1]) & (month >= 1) & (month <= 12)
    good &= (hour < 24) & (minute < 60) & (second < 60)
    first, after = (_days(year, month + later) for later in (0, 1))
    good &= (day >= 1) & (day <= after - first)
    return ((first + day - 1) * 24 + hour) * 3600 + minute * 60 + second, good


def _days(year: Counts, month: Counts) -> Counts:
    """Returns the days from 1970 to the first of the month."""
    months = ((year - YEARS[0]) * 12 + month - 1).astype("datetime64[M]")
    return months.astype("datetime64[D]").astype(np.int64)


def _zones(column: CsvColumn) -> tuple[Counts, Counts, Flags]:
    """Returns zones in seconds east of UTC, where the times before them end, which are valid."""
    data, ends = column.data, column.ends
    # Times are longer than zones, so the offset is inside the field; the "-" of a date is earlier.
    sign, last = data[ends - ZONE_CHARS], data[ends - 1]
    has_zone = ((sign == ord("+")) | (sign == ord("-"))) & (
        ends - ZONE_CHARS >= column.begins + SHORTEST_TIME
    )
    hours, whole = parse_digits(data, ends - 5, ends - 3)
    minutes, fine = parse_digits(data, ends - 2, ends)
    good = ~has_zone | (whole & fine & (hours < 24) & (minutes < 60) & (data[ends - 3] == ord(":")))
    east = np.where(has_zone, np.where(sign == ord("-"), -1, 1) * (hours * 3600 + minutes * 60), 0)
    time_ends = np.where(has_zone, ends - ZONE_CHARS, np.where(last == ord("Z"), ends - 1, ends))
    return east, time_ends, good


NEWLINE, RETURN, COMMA = b"\n\r,"


def csv_header(head: bytes) -> list[str]:
    """Returns the column names in the first line of a file."""
    line = head.partition(b"\n")[0][:1000]
    return [name.strip() for name in line.decode(errors="replace").split(",")]


def read_columns(
    source: TraceFile, names: Sequence[str], most: int | None
) -> Iterator[tuple[CsvColumn, ...]]:
    """Yields the columns `names`, block by block, of the first `most` rows, or of all.

    The file may have other columns, in any order: releases of one trace differ in them. Empty lines
    are skipped. Raises `FormatError` if a name is missing or a row has another number of columns.
    """
    header = csv_header(source.head)
    missing = [name for name in names if header.count(name) != 1]
    if missing:
        begins = short_repr(",".join(header))
        raise source.error(f"begins with {begins}, expected columns {', '.join(names)}", 1)
    rows_left = most
    for block in source.blocks():
        table = _Table(source, block, rows_left)
        if table.rows:
            yield tuple(table.column(name, header.index(name), len(header)) for name in names)
        rows_left = None if rows_left is None else rows_left - table.rows
        if rows_left == 0:
            return


class _Table:
    """The rows of a block, without header and empty lines; at most `most`."""

    def __init__(self, source: TraceFile, block: LineBlock, most: int | None) -> None:
        self._source = source
        self._data: Bytes = np.frombuffer(block.data, dtype=np.uint8)
        ends = np.append(np.flatnonzero(self._data == NEWLINE), self._data.size)
        begins = np.append(0, ends[:-1] + 1)
        if self._data.size:
            ends = ends - ((ends > begins) & (self._data[ends - 1] == RETURN))
        lines = block.first_line + np.arange(ends.size)
        data_lines = np.flatnonzero((ends > begins) & (lines > 1))[:most]
        self._begins, self._ends = begins[data_lines], ends[data_lines]
        self._lines = lines[data_lines]
        self._commas: Counts | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self._begins.size

    def column(self, name: str, at: int, width: int) -> CsvColumn:
        """Returns column `at` of `width`."""
        commas = self._split(width)
        begins = self._begins if at == 0 else commas[:, at - 1] + 1
        ends = self._ends if at == width - 1 else commas[:, at]
        return CsvColumn(self._source.path, name, self._data, begins, ends, self._lines)

    def _split(self, width: int) -> Counts:
        """Returns the offsets of the commas, int64 [rows, width - 1]."""
        if self._commas is None:
            commas = np.flatnonzero(self._data == COMMA)
            first, last = (np.searchsorted(commas, at) for at in (self._begins, self._ends))
            wrong = np.flatnonzero(last - first != width - 1)
            if wrong.size:
                columns = last[wrong[0]] - first[wrong[0]] + 1
                raise self._source.error(
                    f"has {columns} columns, expected {width}", int(self._lines[wrong[0]])
                )
            self._commas = commas[first[:, None] + np.arange(width - 1)]
        return self._commas
