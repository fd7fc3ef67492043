"""Kinds of option values that need nothing of the balancer; `kinds` has the others."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from equipoise.hal.conformance.clauses import FAMILIES, Level
from equipoise.hal.conformance.profile import Profile


@dataclass(frozen=True)
class OptionKind:
    """A type of value.

    Both readers raise ValueError for what is not of the kind; `expected` completes "expected ...".
    With `several`, an option takes one or more of them, and a second use adds to the first.
    """

    expected: str
    from_text: Callable[[str], object]
    from_yaml: Callable[[object], object]
    several: bool = False


def parse_choice(choices: tuple[str, ...]) -> OptionKind:
    """One of these words."""

    def read(value: object) -> str:
        if value not in choices:
            raise ValueError(value)
        return str(value)

    return OptionKind(" or ".join(choices), read, read)


def int_of_yaml(value: object) -> int:
    """A whole number. Raises ValueError."""
    # In YAML `true` is a bool, which Python counts as an int.
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(value)
    return value


def str_of_yaml(value: object) -> str:
    """A text that is not empty. Raises ValueError."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(value)
    return value


def str_of_text(value: str) -> str:
    """The same on the command line."""
    return str_of_yaml(value)


def bool_of_yaml(value: object) -> bool:
    """True or false. Raises ValueError."""
    if not isinstance(value, bool):
        raise ValueError(value)
    return value


def _family(value: object) -> str:
    if value not in FAMILIES:
        raise ValueError(value)
    return str(value)


def _families_from_yaml(value: object) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError(value)
    return tuple(_family(item) for item in values)


def _levels_from_yaml(value: object) -> tuple[Level, ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError(value)
    return tuple(Level(str_of_yaml(item)) for item in values)


WHOLE = OptionKind("a whole number", int, int_of_yaml)
NAME = OptionKind("a name", str_of_text, str_of_yaml)
PATH = OptionKind("a path", lambda text: Path(str_of_text(text)), lambda v: Path(str_of_yaml(v)))
SWITCH = OptionKind("true or false", lambda text: text == "true", bool_of_yaml)
PROFILE = OptionKind(
    " or ".join(Profile), lambda text: Profile(text), lambda value: Profile(str_of_yaml(value))
)
FAMILY_NAMES = OptionKind(
    f"a family ({', '.join(FAMILIES)})", _family, _families_from_yaml, several=True
)
LEVEL_NAMES = OptionKind(
    f"a level ({', '.join(Level)})", lambda text: Level(text), _levels_from_yaml, several=True
)
