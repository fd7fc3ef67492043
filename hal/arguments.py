"""Checks of arguments that callers pass: each error is one line with the argument and its value."""

from math import inf
from numbers import Real
from operator import index
from reprlib import Repr

from equipoise.hal.errors import EquipoiseError

INT32_MAX = 2**31 - 1
_SHORT = Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 40


def short_text(value: object) -> str:
    """Returns the representation of a value, shortened to one line."""
    return " ".join(_SHORT.repr(value).split())


def whole_number(
    name: str,
    value: object,
    error: type[EquipoiseError],
    *,
    least: int | None = None,
    most: int | None = None,
) -> int:
    """Converts any integer type to `int`; a float is refused even where it is whole.

    Raises:
        EquipoiseError: of class `error`, if `value` is no integer or outside `least` to `most`.
    """
    if type(value) is not int:
        try:
            if isinstance(value, bool):
                raise TypeError
            value = index(value)  # type: ignore[arg-type]
        except TypeError:
            got = short_text(value)
            raise error(f"{name} must be a whole number, got {got}") from None
    if least is not None and value < least:
        raise error(f"{name} must be at least {least}, got {short_text(value)}")
    if most is not None and value > most:
        raise error(f"{name} must be at most {most}, got {short_text(value)}")
    return value


def real_number(name: str, value: object, error: type[EquipoiseError]) -> float:
    """Converts to `float`; NaN and infinities pass. Raises an error of class `error`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise error(f"{name} must be a number, got {short_text(value)}")
    try:
        return float(value)
    except OverflowError:
        raise error(f"{name} must be a finite number, got {short_text(value)}") from None


def positive_seconds(name: str, value: object, error: type[EquipoiseError]) -> float:
    """Returns seconds above 0 and below infinity. Raises an error of class `error`."""
    seconds = real_number(name, value, error)
    if not 0 < seconds < inf:  # nan is refused too
        raise error(f"{name} must be seconds above 0, got {short_text(value)}")
    return seconds


def check_type(
    name: str, value: object, kind: type, error: type[EquipoiseError], hint: str = ""
) -> None:
    """Raises an error of class `error`, with `hint` at its end, unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise error(f"{name} must be of type {kind.__name__}, got {_value_or_type(value)}{hint}")


def _value_or_type(value: object) -> str:
    """Objects are named by their type: their representations are long and say less."""
    simple = value is None or isinstance(value, str | int | float | list | tuple | dict)
    return short_text(value) if simple else f"an object of type {type(value).__name__}"
