"""Replacing attributes of an engine: all of them or none, once, and so that it can be seen.

What is put in carries what it replaced, so that a second call finds its own work and leaves it.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any

from equipoise.hal.errors import IntegrationError

ORIGINAL_ATTRIBUTE = "__equipoise_replaces__"
"""Attribute of what was put in: what it replaced."""


@dataclass(frozen=True)
class Patch:
    """One attribute that is replaced.

    Attributes:
        module: of the engine.
        name: in it; dotted within a class.
        wrap: what to put in, made from what is there.
    """

    module: str
    name: str
    wrap: Callable[[Any], Any]

    @property
    def owner(self) -> Any:
        """What has the attribute."""
        parents = self.name.split(".")[:-1]
        module: Any = import_module(self.module)
        return reduce(getattr, parents, module)

    @property
    def attribute(self) -> str:
        """Its last name."""
        return self.name.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


def apply_patches(patches: Iterable[Patch]) -> tuple[str, ...]:
    """Replace all of them; what is replaced already stays as it is.

    Returns:
        What was replaced now.

    Raises:
        IntegrationError: one could not be; everything is as it was.
    """
    applied: list[Patch] = []
    for patch in patches:
        try:
            if _put(patch):
                applied.append(patch)
        except Exception as error:
            undo_patches(reversed(applied))
            raise IntegrationError(f"{patch} cannot be replaced: {error}") from error
    return tuple(map(str, applied))


def undo_patches(patches: Iterable[Patch]) -> None:
    """Put back what was replaced."""
    for patch in patches:
        replacement = inspect.getattr_static(patch.owner, patch.attribute)
        if hasattr(replacement, ORIGINAL_ATTRIBUTE):
            setattr(patch.owner, patch.attribute, getattr(replacement, ORIGINAL_ATTRIBUTE))


def _put(patch: Patch) -> bool:
    """Replace one; whether it was not replaced before."""
    original = inspect.getattr_static(patch.owner, patch.attribute)
    if hasattr(original, ORIGINAL_ATTRIBUTE):
        return False
    replacement = _made(patch, original)
    setattr(replacement, ORIGINAL_ATTRIBUTE, original)
    setattr(patch.owner, patch.attribute, replacement)
    return True


def _made(patch: Patch, original: Any) -> Any:
    """In the place of a static method comes a static method."""
    if isinstance(original, staticmethod):
        return staticmethod(patch.wrap(original.__func__))
    return patch.wrap(original)
