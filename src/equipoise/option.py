"""Options of commands, declared once: at the fields of the settings that they set.

`Annotated[int, Option("ranks that serve", "shape", least=1)] = 4` is the flag, the key of the
configuration file, the default, the range and the line of `--help`.
"""

import math
import os
from collections.abc import Callable, Container, Mapping
from dataclasses import KW_ONLY, MISSING, Field, dataclass, fields, replace
from enum import StrEnum
from inspect import get_annotations
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from equipoise.hal.errors import UsageError

OUTPUT = "output"
"""Group of options that most commands have; `--help` ends with it."""


@dataclass(frozen=True)
class Kind:
    """A type of value.

    Both readers raise ValueError for what is not of the kind; `expected` completes "expected ...".
    With `several`, an option takes one or more of them, and a second use adds to the first.
    """

    expected: str
    from_text: Callable[[str], object]
    from_yaml: Callable[[object], object]
    _: KW_ONLY
    several: bool = False
    metavar: str = "NAME"
    unit: str = ""
    words: tuple[str, ...] = ()
    """Every value that it takes, where these are few."""
    show: Callable[[Any], str] = str
    """How `--help` shows a value."""


def int_of_yaml(value: object) -> int:
    """A whole number. Raises ValueError."""
    # In YAML `true` is a bool, which Python counts as an int.
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(value)
    return value


def real_of_yaml(value: object) -> float:
    """A finite number, also one as 1e-2, which YAML 1.1 takes for a text. Raises ValueError."""
    if isinstance(value, str) and "e" in value.lower():
        return real_of_text(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(value)
    try:
        return _finite(float(value))
    except OverflowError:
        raise ValueError(value) from None


def real_of_text(text: str) -> float:
    """A finite number. Raises ValueError."""
    return _finite(float(text))


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(value)
    return value


def str_of_yaml(value: object) -> str:
    """A text that is not empty, and that a file could be called. Raises ValueError."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(value)
    os.fsencode(value)  # UnicodeEncodeError, which is a ValueError, for half a surrogate
    return value


def bool_of_yaml(value: object) -> bool:
    """True or false. Raises ValueError."""
    if not isinstance(value, bool):
        raise ValueError(value)
    return value


def choice(words: type[StrEnum] | tuple[str, ...], expected: str = "") -> Kind:
    """One of these words; of an enumeration, its member."""

    def read(value: object) -> str:
        if value not in tuple(words):
            raise ValueError(value)
        return str(value) if isinstance(words, tuple) else words(value)

    names = tuple(map(str, words))
    return Kind(expected or " or ".join(names), read, read, metavar="|".join(names), words=names)


def several(kind: Kind, expected: str) -> Kind:
    """One or more values of a kind; in YAML a list, or one without brackets."""

    def of_yaml(value: object) -> tuple[object, ...]:
        values = value if isinstance(value, list) else [value]
        if not values:
            raise ValueError(value)
        return tuple(kind.from_yaml(item) for item in values)

    return replace(kind, expected=expected, from_yaml=of_yaml, several=True)


WHOLE = Kind("a whole number", int, int_of_yaml, metavar="N")
REAL = Kind("a number", real_of_text, real_of_yaml, metavar="X", show="{:g}".format)
SECONDS = replace(REAL, expected="a number of seconds", metavar="SECONDS", unit=" seconds")
NAME = Kind("a name", str_of_yaml, str_of_yaml)
PATH = Kind(
    "a path", lambda text: Path(str_of_yaml(text)), lambda v: Path(str_of_yaml(v)), metavar="FILE"
)
SWITCH = Kind("true or false", lambda text: text == "true", bool_of_yaml)
KINDS: Mapping[type, Kind] = {int: WHOLE, float: REAL, str: NAME, Path: PATH, bool: SWITCH}
"""Of fields whose option names no kind."""


@dataclass(frozen=True)
class Option:
    """An option of a command: a flag, and a key of its configuration file.

    Attributes:
        help: what it sets.
        group: heading under which `--help` shows it.
        kind: what values it takes; as the type of the field says where there is none.
        metavar: how `--help` shows its value; as its kind says where it is empty.
        short: a short form of the flag.
        default: the default in words, where the field's does not say it.
        why_required: why it has to be given; empty where it need not be.
        least, most: range of a number; with `above`, `least` itself is not in it.
        needs: another option without which it says nothing, by key, and why.
        rare: shown by `--help-all` only.
        key: in a configuration file, given where it is not the name of the field; the flag has
            hyphens for its underscores.
        field: name of the field.
        value: default of the field.
    """

    help: str
    group: str
    _: KW_ONLY
    kind: Kind = NAME
    metavar: str = ""
    short: str = ""
    default: str = ""
    why_required: str = ""
    least: float | None = None
    most: float | None = None
    above: bool = False
    needs: tuple[str, str] | None = None
    rare: bool = False
    key: str = ""
    field: str = ""
    value: Any = None

    @property
    def name(self) -> str:
        """The flag."""
        return flag_of(self.key)

    @property
    def flags(self) -> tuple[str, ...]:
        """The short form, if there is one, and the flag."""
        return (self.short, self.name) if self.short else (self.name,)

    @property
    def range(self) -> str:
        """The numbers that it takes, in words; empty where any are taken."""
        if self.least is None:
            return ""
        show = _number if self.kind.show is str else self.kind.show
        least, most = show(self.least), "" if self.most is None else show(self.most)
        if self.above:
            words = f"above {least}" + (f", up to {most}" if most else "")
        else:
            words = f"{least} to {most}" if most else f"at least {least}"
        return words + self.kind.unit

    @property
    def shown_default(self) -> str:
        """What `--help` says in parentheses, without "default"."""
        if self.default or self.why_required:
            return self.default or "required"
        if self.value is None or self.value == ():
            return "none"
        if isinstance(self.value, bool):
            return "on" if self.value else "off"
        return self.kind.show(self.value)

    def check_needs(self, values: Mapping[str, object]) -> None:
        """Raises UsageError where it was set, and the option that it needs was not."""
        value = values[self.key]
        if self.needs is None or (not value and value == self.value):
            return  # a 0 where 0 is the default asks for nothing
        other, why = self.needs
        if not values.get(other):
            raise UsageError(f"{self.name} needs {flag_of(other)}: {why}")

    def check(self, value: object) -> None:
        """Raises UsageError unless a number, or each of several, is in the range."""
        for one in value if isinstance(value, tuple) else (value,):
            if self.least is None or isinstance(one, bool) or not isinstance(one, int | float):
                continue
            low = one <= self.least if self.above else one < self.least
            if low or (self.most is not None and one > self.most):
                raise UsageError(f"{self.name} must be {self.range}, got {_number(one)}")


def flag_of(key: str) -> str:
    """The flag of an option."""
    return "--" + key.replace("_", "-")


@dataclass(frozen=True)
class Argument:
    """An argument of a command without a flag, as its field declares it; no key of a file."""

    metavar: str
    help: str
    key: str = ""


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def options_of(settings: type, keys: Container[str] | None = None) -> dict[str, Option]:
    """The options at the fields of a class of settings, by key; of `keys` only, where given."""
    options = {}
    for field in _own_first(settings):
        hint, option = _declared(field.type, Option)
        if option is None or (keys is not None and field.name not in keys):
            continue
        key = option.key or field.name
        value = None if field.default is MISSING else field.default
        kind = kind_of(hint) if option.kind is NAME else option.kind
        options[key] = replace(option, kind=kind, key=key, field=field.name, value=value)
    return options


def _own_first(settings: type) -> tuple[Field[Any], ...]:
    """The fields of a class before those of its bases."""
    order = [name for base in settings.__mro__ for name in get_annotations(base)]
    return tuple(sorted(fields(settings), key=lambda field: order.index(field.name)))


def arguments_of(settings: type) -> tuple[Argument, ...]:
    """The arguments without a flag, in their order."""
    found = ((field.name, _declared(field.type, Argument)[1]) for field in _own_first(settings))
    return tuple(replace(argument, key=key) for key, argument in found if argument is not None)


def _declared(hint: Any, of: type) -> tuple[Any, Any]:
    """The type of an annotated field, and what of a class is annotated."""
    if get_origin(hint) is not Annotated:
        return hint, None
    plain, *notes = get_args(hint)
    return plain, next((note for note in notes if isinstance(note, of)), None)


def kind_of(hint: Any) -> Kind:
    """The kind of a field's type, whether it may be None or not."""
    if get_origin(hint) in (UnionType, Union):
        (hint,) = (one for one in get_args(hint) if one is not type(None))
    if get_origin(hint) is Literal:
        return choice(get_args(hint))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return choice(hint)
    return KINDS[hint]
