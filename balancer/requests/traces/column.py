"""A column of a block of CSV: where its fields are in the bytes, and the numbers that they say.

All rows are read at once by numpy: a trace of twenty million rows would take minutes, and hundreds
of bytes for each row, if every field became an object.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from equipoise.balancer.formats.numbers import short
from equipoise.balancer.requests.block_hashes import Counts
from equipoise.balancer.requests.workload import TOKENS_MOST
from equipoise.hal.errors import FormatError

Bytes: TypeAlias = npt.NDArray[np.uint8]
Flags: TypeAlias = npt.NDArray[np.bool_]
DIGITS_MOST = 18
"""Digits of a number that fit into 64 bits, whichever they are."""
SECOND = 10**9
"""Nanoseconds of one."""
SECONDS_MOST = 9 * SECOND
"""285 years, which nanoseconds of 64 bits can say."""
NANO_DIGITS = 9
INTEGER = re.compile(r"-?[0-9]+")


@dataclass(frozen=True, eq=False)
class Column:
    """n fields of one name.

    Attributes:
        path: the file.
        name: what the header calls it.
        data: uint8, the bytes of the block.
        begins: int64 [n], where the fields begin in them.
        ends: int64 [n], where they end.
        lines: int64 [n], the lines that they are in.
    """

    path: Path
    name: str
    data: Bytes
    begins: Counts
    ends: Counts
    lines: Counts

    def text(self, row: int) -> str:
        """One field."""
        return self.data[self.begins[row] : self.ends[row]].tobytes().decode(errors="replace")

    def require(self, good: Flags, expected: str) -> None:
        """Raise `FormatError` for the first row that is not good (bool [n])."""
        if not good.all():
            row = int(np.argmin(good))
            what = f"{self.name} is {short(self.text(row))}, expected {expected}"
            raise FormatError(str(self.path), f"line {self.lines[row]}: {what}")

    def counts(self, least: int) -> Counts:
        """Whole numbers, int64 [n]. Raises `FormatError` for what is none, or is out of range."""
        values, good = digits(self.data, self.begins, self.ends)
        good &= (values >= least) & (values <= TOKENS_MOST)
        if not good.all():
            # A number out of range is told from what is no number.
            integer = INTEGER.fullmatch(self.text(int(np.argmin(good))))
            kind = f"{least} to {TOKENS_MOST}" if integer else "a whole number"
            self.require(good, kind)
        return values

    def nanoseconds(self) -> Counts:
        """Of decimal numbers of seconds, int64 [n]. Raises `FormatError`: not 0 to `SECONDS_MOST`.

        Digits of less than a nanosecond are cut off.
        """
        points = np.flatnonzero(self.data == ord("."))
        found = np.append(points, self.data.size)[np.searchsorted(points, self.begins)]
        splits = np.minimum(found, self.ends)
        whole, good = digits(self.data, self.begins, splits)
        parts, fine = fractions(self.data, splits, self.ends)
        self.require(good & fine & (whole <= SECONDS_MOST), f"seconds, 0 to {SECONDS_MOST}")
        return whole * SECOND + parts


def digits(data: Bytes, begins: Counts, ends: Counts) -> tuple[Counts, Flags]:
    """What stands in data[begins : ends], int64 [n]; and where it is 1 to `DIGITS_MOST` digits.

    Elsewhere the value means nothing.
    """
    widths = ends - begins
    good = (widths > 0) & (widths <= DIGITS_MOST)
    values = np.zeros(widths.size, dtype=np.int64)
    for back in range(int(widths[good].max(initial=0))):
        inside = good & (back < widths)
        # What is below "0" wraps around, and is above 9 as well.
        digit = data[np.where(inside, ends - 1 - back, 0)] - np.uint8(ord("0"))
        good &= ~inside | (digit <= 9)
        values += np.where(inside & good, digit, 0) * np.int64(10**back)
    return values, good


def fractions(data: Bytes, begins: Counts, ends: Counts) -> tuple[Counts, Flags]:
    """Nanoseconds of `.123`, and 0 of nothing, int64 [n]; and where it is one of both."""
    values, fine = digits(data, begins + 1, ends)
    widths = ends - begins - 1
    # A point cannot be looked for behind the data: there the field is empty.
    fine &= data[np.minimum(begins, data.size - 1)] == ord(".")
    up, down = (
        10 ** np.clip(by, 0, NANO_DIGITS) for by in (NANO_DIGITS - widths, widths - NANO_DIGITS)
    )
    return np.where(fine, values * up // down, 0), fine | (ends == begins)
