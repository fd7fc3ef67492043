"""Times of the calendar in a column: 2023-11-16 18:15:46.6805900, 2024-05-10 00:00:00+00:00."""

import numpy as np

from equipoise.balancer.requests.block_hashes import Counts
from equipoise.balancer.requests.traces.column import SECOND, Column, Flags, digits, fractions

EXPECTED = "a time such as 2024-05-10 00:00:00.009930+00:00"
SHORTEST = len("2024-05-10 00:00:00")
PARTS = (0, 4), (5, 2), (8, 2), (11, 2), (14, 2), (17, 2)
"""Where year, month, day, hour, minute and second begin, and how long they are."""
SEPARATORS = (4, b"-"), (7, b"-"), (10, b" T"), (13, b":"), (16, b":")
ZONE = len("+00:00")
YEARS = 1970, 2200
"""Nanoseconds of these fit into 64 bits."""


def nanoseconds(column: Column) -> Counts:
    """Since 1970, int64 [n]; where no zone is said it is UTC. Raises `FormatError`.

    The fraction may be of up to 18 digits, or be left out where it is zero, as Python writes it.
    """
    column.require(column.ends - column.begins >= SHORTEST, EXPECTED)
    zones, behind, zoned = _zones(column)
    parts, fine = fractions(column.data, column.begins + SHORTEST, behind)
    seconds, real = _seconds(column)
    column.require(zoned & fine & real, EXPECTED)
    return (seconds - zones) * SECOND + parts


def _seconds(column: Column) -> tuple[Counts, Flags]:
    """Without fraction and zone; and which are times that exist."""
    data, begins = column.data, column.begins
    found = [digits(data, begins + at, begins + at + size) for at, size in PARTS]
    good = np.logical_and.reduce([fine for _, fine in found])
    for at, allowed in SEPARATORS:
        good &= np.isin(data[begins + at], np.frombuffer(allowed, dtype=np.uint8))
    year, month, day, hour, minute, second = (values for values, _ in found)
    good &= (year >= YEARS[0]) & (year < YEARS[1]) & (month >= 1) & (month <= 12)
    good &= (hour < 24) & (minute < 60) & (second < 60)
    first, after = (_days(year, month + later) for later in (0, 1))
    good &= (day >= 1) & (day <= after - first)
    return ((first + day - 1) * 24 + hour) * 3600 + minute * 60 + second, good


def _days(year: Counts, month: Counts) -> Counts:
    """From 1970 to the first of the month."""
    months = ((year - YEARS[0]) * 12 + month - 1).astype("datetime64[M]")
    return months.astype("datetime64[D]").astype(np.int64)


def _zones(column: Column) -> tuple[Counts, Counts, Flags]:
    """Seconds east of Greenwich, where the time ends that stands before it, and which are good."""
    data, ends = column.data, column.ends
    # A time is longer than a zone, so this is inside the field; a date's "-" is further ahead.
    sign, last = data[ends - ZONE], data[ends - 1]
    said = ((sign == ord("+")) | (sign == ord("-"))) & (ends - ZONE >= column.begins + SHORTEST)
    hours, whole = digits(data, ends - 5, ends - 3)
    minutes, fine = digits(data, ends - 2, ends)
    good = ~said | (whole & fine & (hours < 24) & (minutes < 60) & (data[ends - 3] == ord(":")))
    east = np.where(said, np.where(sign == ord("-"), -1, 1) * (hours * 3600 + minutes * 60), 0)
    behind = np.where(said, ends - ZONE, np.where(last == ord("Z"), ends - 1, ends))
    return east, behind, good
