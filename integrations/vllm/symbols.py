"""What of an engine is touched, as it must be found: by module, name and signature.

Engines have no interface for most of what is extended here, and change it from release to release.
So everything that is called or replaced is on a list, and is looked at before anything is done.
"""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from importlib import import_module

ANY = "..."
"""A signature that does not matter: what is only there to be replaced, or an attribute."""


@dataclass(frozen=True)
class Symbol:
    """A function, class or attribute of the engine.

    Attributes:
        module: that it is found in.
        name: there; dotted within a class.
        signature: its parameters in order, `=` behind those with a default, `*` before those that
            go by name only: `self, request, *, timeout=`.
    """

    module: str
    name: str
    signature: str = ANY

    def find(self) -> object:
        """What is called so. Raises `ImportError` or `AttributeError`."""
        module: object = import_module(self.module)
        return reduce(getattr, self.name.split("."), module)

    def problem(self) -> str | None:
        """What is wrong with it, in one line; None if it is as expected."""
        try:
            found = self.find()
        except ImportError as error:
            return f"{self} is missing: {error}"
        except AttributeError:
            return f"{self} is missing"
        except Exception as error:
            return f"{self} cannot be imported: {error!r}"
        if self.signature == ANY:
            return None
        return self._differs(found)

    def _differs(self, found: object) -> str | None:
        try:
            actual = signature_of(found)
        except (TypeError, ValueError):
            return f"{self} has no signature: it is {found!r}"
        if actual == self.signature:
            return None
        return f"{self} has the signature ({actual}), not ({self.signature})"

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


_STARS: dict[object, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def signature_of(found: object) -> str:
    """As in `Symbol.signature`. Raises `TypeError` or `ValueError` where there is none."""
    parts, named = [], False
    for parameter in inspect.signature(found).parameters.values():  # type: ignore[arg-type]
        if parameter.kind is parameter.KEYWORD_ONLY and not named:
            parts.append("*")
        named = named or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = _STARS.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else "="
        parts.append(f"{stars}{parameter.name}{default}")
    return ", ".join(parts)


def problems(symbols: Iterable[Symbol]) -> tuple[str, ...]:
    """Of all that are not as expected, one line each."""
    return tuple(found for symbol in symbols if (found := symbol.problem()) is not None)
