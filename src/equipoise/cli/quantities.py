"""Quantities with a unit or of several numbers: bytes such as 24MiB, and one number per rank."""

import re
from decimal import Decimal
from pathlib import Path

from equipoise.hal.errors import UsageError

UNITS = {"": 1} | {
    prefix + binary: (1024 if binary else 1000) ** power
    for power, prefix in enumerate("kMGT", start=1)
    for binary in ("", "i")
}
UNITS["Ki"] = UNITS["ki"]  # as the standard writes it; a bare K is left out, which may mean either
MOST_BYTES = 2**60
NUMBER = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?)([kMGT]i?|Ki)?B?")
POWER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")
"""A number with a power of ten."""


def bytes_of_text(text: str) -> int:
    """44040192, 44M, 1.5GiB: decimal or binary, the B may be left out. Raises ValueError.

    A part of a byte, none at all, and more than 2^60 are refused.
    """
    found = NUMBER.fullmatch(text)
    if found is None:
        raise ValueError(text)
    exact = Decimal(found[1]) * UNITS[found[2] or ""]
    return _bytes(exact, text)


def bytes_of_yaml(value: object) -> int:
    """A whole number of bytes, or a text as on the command line. Raises ValueError."""
    if isinstance(value, str):
        return bytes_of_text(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(value)
    return _bytes(Decimal(value), str(value))


def _bytes(exact: Decimal, text: str) -> int:
    if exact != exact.to_integral_value() or not 1 <= exact <= MOST_BYTES:
        raise ValueError(text)
    return int(exact)


def numbers_of_text(text: str) -> "tuple[float, ...] | Path":
    """1,1,0.5 as numbers; anything else is the path of a file of them. Raises ValueError."""
    if not text or "\0" in text:
        raise ValueError(text)
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        if "," in text and not Path(text).exists():
            raise
        return Path(text)


def numbers_of_yaml(value: object) -> "tuple[float, ...] | Path":
    """A list of numbers, or a text as on the command line. Raises ValueError."""
    if isinstance(value, str):
        return numbers_of_text(value)
    if not isinstance(value, list) or not value:
        raise ValueError(value)
    return tuple(real_of_yaml(item) for item in value)


def real_of_yaml(value: object) -> float:
    """A number, also one such as 1e-2, which YAML 1.1 takes for a text. Raises ValueError."""
    if isinstance(value, str) and POWER.fullmatch(value):
        return float(value)
    # In YAML `true` is a bool, which Python counts as an int.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(value)
    try:
        return float(value)
    except OverflowError:
        raise ValueError(value) from None


def numbers(flag: str, given: "tuple[float, ...] | Path", expected: int) -> tuple[float, ...]:
    """The numbers, read from their file if that is what was given: commas, blanks or lines between.

    Raises UsageError that names the flag, also where they are not as many as expected, or not all
    positive and finite.
    """
    source = flag
    if isinstance(given, Path):
        source = f"{flag}: {given}"
        given = _read(source, given)
    if len(given) != expected:
        raise UsageError(f"{source}: {len(given)} numbers for {expected} ranks")
    for place, value in enumerate(given):
        # So written, nan is refused too.
        if not 0 < value < float("inf"):
            raise UsageError(
                f"{source}: rank {place} has {value:g}, which is not a positive number"
            )
    return given


def _read(source: str, path: Path) -> tuple[float, ...]:
    try:
        words = path.read_text(encoding="utf-8").replace(",", " ").split()
    except UnicodeDecodeError:
        raise UsageError(f"{source}: is not text") from None
    except OSError as error:
        raise UsageError(f"{source}: cannot be read: {error.strerror}") from None
    found = []
    for place, word in enumerate(words):
        try:
            found.append(float(word))
        except ValueError:
            raise UsageError(f"{source}: number {place} is {word[:40]!r}") from None
    return tuple(found)
