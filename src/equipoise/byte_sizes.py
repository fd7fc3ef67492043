"""Numbers of bytes as people write them: 44040192, 44M, 1.5GiB."""

import re
from decimal import Decimal

from equipoise.option import Kind

UNITS = {"": 1} | {
    prefix + binary: (1024 if binary else 1000) ** power
    for power, prefix in enumerate("kMGT", start=1)
    for binary in ("", "i")
}
UNITS["Ki"] = UNITS["ki"]  # as the standard writes it; a bare K is left out, which may mean either
MAX_BYTES = 2**60
NUMBER = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?)([kMGT]i?|Ki)?B?")


def bytes_of_text(text: str) -> int:
    """44040192, 44M, 1.5GiB: decimal or binary, the B may be left out. Raises ValueError.

    A part of a byte, none at all, and more than 2^60 are refused.
    """
    match = NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(text)
    exact = Decimal(match[1]) * UNITS[match[2] or ""]
    return _bytes(exact, text)


def bytes_of_value(value: object) -> int:
    """A whole number of bytes, or a text as on the command line. Raises ValueError."""
    if isinstance(value, str):
        return bytes_of_text(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(value)
    return _bytes(Decimal(value), str(value))


def _bytes(exact: Decimal, text: str) -> int:
    if exact != exact.to_integral_value() or not 1 <= exact <= MAX_BYTES:
        raise ValueError(text)
    return int(exact)


def show_bytes(value: int) -> str:
    """A size as it may be typed, in whole KiB or MiB."""
    return f"{value >> 20}MiB" if value >= 1 << 20 else f"{value >> 10}KiB"


BYTES = Kind(
    "whole bytes such as 24MiB or 44M, 1 to 2^60",
    bytes_of_text,
    bytes_of_value,
    metavar="SIZE",
    show=show_bytes,
)
"""Sizes as values of options."""
