"""Kinds of option values that only some options have: quantities, ranges, lists, mappings."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from equipoise.balancer.formats.iterations import IterationRange
from equipoise.hal.errors import UsageError
from equipoise.input_files import read_input
from equipoise.option import (
    PATH,
    REAL,
    WHOLE,
    Kind,
    real_of_yaml,
    several,
    str_of_yaml,
)


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


def points_of_text(text: str) -> tuple[tuple[float, float], ...]:
    """1.0:41.2,1.3:44 as pairs of numbers. Raises ValueError."""
    pairs = [word.split(":") for word in text.split(",")]
    return tuple((float(first), float(second)) for first, second in pairs)


def points_of_yaml(value: object) -> tuple[tuple[float, float], ...]:
    """A list of pairs of numbers, or a text as on the command line. Raises ValueError."""
    if isinstance(value, str):
        return points_of_text(value)
    if not isinstance(value, list) or not all(isinstance(pair, list) for pair in value):
        raise ValueError(value)
    return tuple((real_of_yaml(first), real_of_yaml(second)) for first, second in value)


def resolve_numbers(
    flag: str, values: "tuple[float, ...] | Path", expected: int
) -> tuple[float, ...]:
    """The numbers, read from their file if that is what was given: commas, blanks or lines between.

    Raises UsageError that names the flag, also where they are not as many as expected, or not all
    positive and finite.
    """
    source = flag
    if isinstance(values, Path):
        source = f"{flag}: {values}"
        values = _read(source, values)
    if len(values) != expected:
        raise UsageError(f"{source}: {len(values)} numbers for {expected} ranks")
    for place, value in enumerate(values):
        # So written, nan is refused too.
        if not 0 < value < float("inf"):
            raise UsageError(
                f"{source}: rank {place} has {value:g}, which is not a positive number"
            )
    return values


def _read(source: str, path: Path) -> tuple[float, ...]:
    try:
        words = read_input(path).decode().replace(",", " ").split()
    except UnicodeDecodeError:
        raise UsageError(f"{source}: is not text") from None
    except OSError as error:
        raise UsageError(f"{source}: cannot be read: {error.strerror}") from None
    numbers = []
    for place, word in enumerate(words):
        try:
            numbers.append(float(word))
        except ValueError:
            raise UsageError(f"{source}: number {place} is {word[:40]!r}") from None
    return tuple(numbers)


def time_of_text(text: str) -> datetime:
    """A date with a time, ISO 8601, UTC unless it has an offset. Raises ValueError."""
    return _in_utc(datetime.fromisoformat(text))


def time_of_yaml(value: object) -> datetime:
    """The same, or what YAML has made a time of. Raises ValueError."""
    if isinstance(value, datetime):
        return _in_utc(value)
    return time_of_text(str_of_yaml(value))


def _in_utc(time: datetime) -> datetime:
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time


def _range_from_yaml(value: object) -> IterationRange:
    return IterationRange.parse(str_of_yaml(value))


def _workers_from_yaml(value: object) -> tuple[object, ...]:
    # What an entry says is checked where all of them are put together.
    if not isinstance(value, list) or not value:
        raise ValueError(value)
    return tuple(value)


def _setting_from_text(value: str) -> tuple[str, object]:
    name, equals, text = value.partition("=")
    if not name or not equals:
        raise ValueError(value)
    for parse in (int, float):
        try:
            return name, parse(text)
        except ValueError:
            continue
    return name, text


def _settings_from_yaml(value: object) -> tuple[tuple[str, object], ...]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(value)
    return tuple(value.items())


def _origin(value: object) -> str:
    """`*`, `none`, or the origin of a web page, as browsers send it."""
    text = str_of_yaml(value)
    parts = urlsplit(text)
    if text in ("*", "none") or (parts.netloc and text == f"{parts.scheme}://{parts.netloc}"):
        return text
    raise ValueError(value)


def separated(kind: Kind, expected: str, metavar: str) -> Kind:
    """Values of a kind with commas between; in YAML also a list, or one."""

    def of_text(text: str) -> tuple[object, ...]:
        return tuple(kind.from_text(word.strip()) for word in text.split(","))

    def of_yaml(value: object) -> tuple[object, ...]:
        if isinstance(value, str):
            return of_text(value)
        values = value if isinstance(value, list) else [value]
        if not values:
            raise ValueError(value)
        return tuple(kind.from_yaml(item) for item in values)

    return Kind(expected, of_text, of_yaml, metavar=metavar)


RANGE = Kind(
    "START-STOP, whole numbers with START below STOP",
    IterationRange.parse,
    _range_from_yaml,
    metavar="START-STOP",
)
WHOLES = separated(WHOLE, "whole numbers with commas between", "N[,N...]")
REALS = separated(REAL, "numbers with commas between", "X,X,...")
TIME = Kind("a time such as 2026-11-27T14:05", time_of_text, time_of_yaml, metavar="TIME")
NUMBERS = Kind(
    "numbers with commas between, or a file",
    numbers_of_text,
    numbers_of_yaml,
    metavar="X,X,...|FILE",
)
POINTS = Kind(
    "pairs such as 1.0:41.2,1.1:41.3,1.5:47",
    points_of_text,
    points_of_yaml,
    metavar="R:MS,R:MS,...",
)
TEXTS = several(PATH, "a path or a list of paths")
WORKERS = Kind(
    "a list of URLs or of mappings", str_of_yaml, _workers_from_yaml, several=True, metavar="URL"
)
ORIGINS = replace(
    several(
        Kind("", _origin, _origin, metavar="ORIGIN"),
        "*, none, or origins such as https://chat.example",
    ),
    show=" ".join,
)
SETTINGS = Kind(
    "NAME=VALUE, or a mapping",
    _setting_from_text,
    _settings_from_yaml,
    several=True,
    metavar="NAME=VALUE",
)
