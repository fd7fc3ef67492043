"""Kinds of option values: how each is read from the command line as text and from YAML as typed.

Among them quantities with a unit (bytes such as 24MiB) and lists of one number per rank.
"""

import math
import re
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from equipoise.balancer.formats.iterations import IterationRange
from equipoise.balancer.requests.catalogue import WORKLOADS
from equipoise.byte_sizes import bytes_of_text, bytes_of_value
from equipoise.cli.option_kinds import NAME as NAME
from equipoise.cli.option_kinds import PATH as PATH
from equipoise.cli.option_kinds import SWITCH as SWITCH
from equipoise.cli.option_kinds import WHOLE as WHOLE
from equipoise.cli.option_kinds import OptionKind as OptionKind
from equipoise.cli.option_kinds import int_of_yaml, str_of_text, str_of_yaml
from equipoise.cli.option_kinds import parse_choice as parse_choice
from equipoise.demo.settings import (
    Balance,
    CommitMode,
    ExchangeForm,
    Locality,
    RoutingRule,
    Shares,
    VariantName,
)
from equipoise.hal.errors import UsageError
from equipoise.input_files import read_input
from equipoise.serve.picker.settings import TokenSource
from equipoise.serve.settings import ClientRank

POWER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")
"""A number with a power of ten."""


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


POLICIES = "greedy", "connected", "incremental"
"""The planner's, spelt out: to import it takes longer than to say what was mistyped."""
SPLITS = "shares", "even"
OBJECTIVES = "tokens", "active_experts"
PRECISIONS = "bf16", "fp8", "fp4"
LINKS = "node", "network", "host"
ENDPOINTS = "chat", "completions"
PHASES = "prefill", "decode"
ENGINES = "vllm", "sglang", "vllm-ascend", "trtllm", "equipoise"
"""Whose balancers `replay` knows."""


def _real_from_yaml(value: object) -> object:
    return _finite(real_of_yaml(value))


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(value)
    return value


def _paths_from_yaml(value: object) -> tuple[Path, ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError(value)
    return tuple(Path(str_of_yaml(item)) for item in values)


def _variants_from_yaml(value: object) -> tuple[VariantName, ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError(value)
    return tuple(VariantName(str_of_yaml(item)) for item in values)


def _balance_from_yaml(value: object) -> Balance:
    # YAML 1.1 reads an unquoted `on` as true.
    if isinstance(value, bool):
        return Balance.ON if value else Balance.OFF
    return Balance(str_of_yaml(value))


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


def _origins_from_yaml(value: object) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values:
        raise ValueError(value)
    return tuple(_origin(item) for item in values)


def _wholes_of_text(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _wholes_of_yaml(value: object) -> tuple[int, ...]:
    if isinstance(value, str):
        return _wholes_of_text(value)
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError(value)
    return tuple(int_of_yaml(item) for item in values)


def _engines_of_text(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if not set(names) <= set(ENGINES):
        raise ValueError(text)
    return names


def _engines_of_yaml(value: object) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    return _engines_of_text(",".join(str_of_yaml(item) for item in values))


SECONDS = OptionKind("a number of seconds", lambda text: _finite(float(text)), _real_from_yaml)
TIME = OptionKind("a time such as 2026-11-27T14:05", time_of_text, time_of_yaml)
REAL = OptionKind("a number", lambda text: _finite(float(text)), _real_from_yaml)
TEXTS = OptionKind(
    "a path or a list of paths",
    lambda text: Path(str_of_text(text)),
    _paths_from_yaml,
    several=True,
)
SHARES = OptionKind(
    " or ".join(Shares), lambda text: Shares(text), lambda value: Shares(str_of_yaml(value))
)
VARIANTS = OptionKind(
    f"a variant ({', '.join(VariantName)})",
    lambda text: VariantName(text),
    _variants_from_yaml,
    several=True,
)
EXCHANGE = OptionKind(
    " or ".join(ExchangeForm),
    lambda text: ExchangeForm(text),
    lambda value: ExchangeForm(str_of_yaml(value)),
)
LOCALITY = OptionKind(
    " or ".join(Locality),
    lambda text: Locality(text),
    lambda value: Locality(str_of_yaml(value)),
)
COMMIT = OptionKind(
    " or ".join(CommitMode),
    lambda text: CommitMode(text),
    lambda value: CommitMode(str_of_yaml(value)),
)
RULE = OptionKind(
    " or ".join(RoutingRule),
    lambda text: RoutingRule(text),
    lambda value: RoutingRule(str_of_yaml(value)),
)
BALANCE = OptionKind("on or off", lambda text: Balance(text), _balance_from_yaml)
RANGE = OptionKind(
    "START-STOP, whole numbers with START below STOP", IterationRange.parse, _range_from_yaml
)
POLICY, SPLIT, OBJECTIVE = parse_choice(POLICIES), parse_choice(SPLITS), parse_choice(OBJECTIVES)
PRECISION, LINK, PHASE = parse_choice(PRECISIONS), parse_choice(LINKS), parse_choice(PHASES)
ENGINE_NAMES = OptionKind(
    f"names of {', '.join(ENGINES)}, with commas between", _engines_of_text, _engines_of_yaml
)
WHOLES = OptionKind("whole numbers with commas between", _wholes_of_text, _wholes_of_yaml)
ENDPOINT, WORKLOAD = parse_choice(ENDPOINTS), parse_choice(tuple(WORKLOADS))
BYTES = OptionKind(
    "whole bytes such as 24MiB or 44M, 1 to 2^60",
    bytes_of_text,
    bytes_of_value,
)
NUMBERS = OptionKind(
    "numbers with commas between, or a file",
    numbers_of_text,
    numbers_of_yaml,
)
POINTS = OptionKind("pairs such as 1.0:41.2,1.1:41.3,1.5:47", points_of_text, points_of_yaml)
WORKERS = OptionKind("a list of URLs or of mappings", str_of_text, _workers_from_yaml, several=True)
ORIGINS = OptionKind(
    "*, none, or origins such as https://chat.example", _origin, _origins_from_yaml, several=True
)
SETTINGS = OptionKind(
    "NAME=VALUE, or a mapping", _setting_from_text, _settings_from_yaml, several=True
)
CLIENT_RANK = OptionKind(
    " or ".join(ClientRank),
    lambda text: ClientRank(text),
    lambda value: ClientRank(str_of_yaml(value)),
)
TOKEN_SOURCE = OptionKind(
    " or ".join(TokenSource),
    lambda text: TokenSource(text),
    lambda value: TokenSource(str_of_yaml(value)),
)
