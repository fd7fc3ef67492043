"""What a value of an option may be: read from the command line as text, from YAML as typed."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from equipoise.balancer.formats.iterations import Iterations
from equipoise.balancer.requests.catalogue import WORKLOADS
from equipoise.cli import quantities
from equipoise.demo.settings import (
    Balance,
    CommitMode,
    ExchangeForm,
    Locality,
    RoutingRule,
    Shares,
    VariantName,
)
from equipoise.hal.conformance.clauses import FAMILIES
from equipoise.hal.conformance.profile import Profile
from equipoise.serve.settings import ClientRank


@dataclass(frozen=True)
class Kind:
    """A type of value.

    Both readers raise ValueError for what is not of the kind; `word` completes "expected ...".
    """

    word: str
    from_text: Callable[[str], object]
    from_yaml: Callable[[object], object]


POLICIES = "greedy", "connected", "incremental"
"""The planner's, spelt out: to import it takes longer than to say what was mistyped."""
SPLITS = "level", "even"
OBJECTIVES = "tokens", "active_experts"
PRECISIONS = "bf16", "fp8", "fp4"
LINKS = "node", "network", "host"
ENDPOINTS = "chat", "completions"


def parse_choice(choices: tuple[str, ...]) -> Kind:
    """One of these words."""

    def read(value: object) -> str:
        if value not in choices:
            raise ValueError(value)
        return str(value)

    return Kind(" or ".join(choices), read, read)


def _int_from_yaml(value: object) -> object:
    # In YAML `true` is a bool, which Python counts as an int.
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(value)
    return value


def _real_from_yaml(value: object) -> object:
    return _finite(quantities.real_of_yaml(value))


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(value)
    return value


def _str_from_yaml(value: object) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(value)
    return value


def _str_from_text(value: str) -> str:
    return _str_from_yaml(value)


def _paths_from_yaml(value: object) -> tuple[Path, ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError(value)
    return tuple(Path(_str_from_yaml(item)) for item in values)


def _variants_from_yaml(value: object) -> tuple[VariantName, ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError(value)
    return tuple(VariantName(_str_from_yaml(item)) for item in values)


def _balance_from_yaml(value: object) -> Balance:
    # YAML 1.1 reads an unquoted `on` as true.
    if isinstance(value, bool):
        return Balance.ON if value else Balance.OFF
    return Balance(_str_from_yaml(value))


def _bool_from_yaml(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(value)
    return value


def _range_from_yaml(value: object) -> Iterations:
    return Iterations.parse(_str_from_yaml(value))


def _family(value: object) -> str:
    if value not in FAMILIES:
        raise ValueError(value)
    return str(value)


def _families_from_yaml(value: object) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError(value)
    return tuple(_family(item) for item in values)


def _workers_from_yaml(value: object) -> tuple[object, ...]:
    # What an entry says is checked where all of them are put together.
    if not isinstance(value, list) or not value:
        raise ValueError(value)
    return tuple(value)


def _setting_from_text(value: str) -> tuple[str, object]:
    name, equals, said = value.partition("=")
    if not name or not equals:
        raise ValueError(value)
    for read in (int, float):
        try:
            return name, read(said)
        except ValueError:
            continue
    return name, said


def _settings_from_yaml(value: object) -> tuple[tuple[str, object], ...]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(value)
    return tuple(value.items())


WHOLE = Kind("a whole number", int, _int_from_yaml)
SECONDS = Kind("a number of seconds", lambda text: _finite(float(text)), _real_from_yaml)
REAL = Kind("a number", lambda text: _finite(float(text)), _real_from_yaml)
NAME = Kind("a name", _str_from_text, _str_from_yaml)
PATH = Kind("a path", lambda text: Path(_str_from_text(text)), lambda v: Path(_str_from_yaml(v)))
TEXTS = Kind("a path or a list of paths", lambda text: Path(_str_from_text(text)), _paths_from_yaml)
SHARES = Kind(
    " or ".join(Shares), lambda text: Shares(text), lambda value: Shares(_str_from_yaml(value))
)
VARIANTS = Kind(
    f"a variant ({', '.join(VariantName)})", lambda text: VariantName(text), _variants_from_yaml
)
EXCHANGE = Kind(
    " or ".join(ExchangeForm),
    lambda text: ExchangeForm(text),
    lambda value: ExchangeForm(_str_from_yaml(value)),
)
LOCALITY = Kind(
    " or ".join(Locality),
    lambda text: Locality(text),
    lambda value: Locality(_str_from_yaml(value)),
)
COMMIT = Kind(
    " or ".join(CommitMode),
    lambda text: CommitMode(text),
    lambda value: CommitMode(_str_from_yaml(value)),
)
RULE = Kind(
    " or ".join(RoutingRule),
    lambda text: RoutingRule(text),
    lambda value: RoutingRule(_str_from_yaml(value)),
)
BALANCE = Kind("on or off", lambda text: Balance(text), _balance_from_yaml)
SWITCH = Kind("true or false", lambda text: text == "true", _bool_from_yaml)
PROFILE = Kind(
    " or ".join(Profile), lambda text: Profile(text), lambda value: Profile(_str_from_yaml(value))
)
FAMILY_NAMES = Kind(f"a family ({', '.join(FAMILIES)})", _family, _families_from_yaml)
RANGE = Kind("START-STOP, whole numbers with START below STOP", Iterations.parse, _range_from_yaml)
POLICY, SPLIT, OBJECTIVE = parse_choice(POLICIES), parse_choice(SPLITS), parse_choice(OBJECTIVES)
PRECISION, LINK = parse_choice(PRECISIONS), parse_choice(LINKS)
ENDPOINT, WORKLOAD = parse_choice(ENDPOINTS), parse_choice(tuple(WORKLOADS))
BYTES = Kind(
    "whole bytes such as 24MiB or 44M, 1 to 2^60",
    quantities.bytes_of_text,
    quantities.bytes_of_yaml,
)
NUMBERS = Kind(
    "numbers with commas between, or a file",
    quantities.numbers_of_text,
    quantities.numbers_of_yaml,
)
WORKERS = Kind("a list of URLs or of mappings", _str_from_text, _workers_from_yaml)
SETTINGS = Kind("NAME=VALUE, or a mapping", _setting_from_text, _settings_from_yaml)
CLIENT_RANK = Kind(
    " or ".join(ClientRank),
    lambda text: ClientRank(text),
    lambda value: ClientRank(_str_from_yaml(value)),
)
