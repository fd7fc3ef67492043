"""Replaces attributes of an engine: all or none, once, and reversibly.

A replacement carries the original in an attribute, so that applying a patch again does nothing.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any

from equipoise.hal.errors import IntegrationError
from equipoise.integrations.vllm.entry import ORIGINAL_ATTRIBUTE


@dataclass(frozen=True)
class Patch:
    """Replacement of one attribute.

    Attributes:
        module: of the engine.
        name: in the module; dotted within a class.
        wrap: returns the replacement for the original.
    """

    module: str
    name: str
    wrap: Callable[[Any], Any]

    @property
    def owner(self) -> Any:
        """The module or class that has the attribute."""
        parents = self.name.split(".")[:-1]
        module: Any = import_module(self.module)
        return reduce(getattr, parents, module)

    @property
    def attribute(self) -> str:
        """Last component of the name."""
        return self.name.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


def apply_patches(patches: Iterable[Patch]) -> tuple[str, ...]:
    """Apply all patches; those applied before stay as they are.

    Returns:
        Names of those that were applied now.

    Raises:
        IntegrationError: one failed; those before it were undone.
    """
    applied: list[Patch] = []
    for patch in patches:
        try:
            if _apply(patch):
                applied.append(patch)
        except Exception as error:
            undo_patches(reversed(applied))
            raise IntegrationError(f"{patch} cannot be replaced: {error}") from error
    return tuple(map(str, applied))


def undo_patches(patches: Iterable[Patch]) -> None:
    """Restore the originals."""
    for patch in patches:
        replacement = inspect.getattr_static(patch.owner, patch.attribute)
        if hasattr(replacement, ORIGINAL_ATTRIBUTE):
            setattr(patch.owner, patch.attribute, getattr(replacement, ORIGINAL_ATTRIBUTE))


def _apply(patch: Patch) -> bool:
    """Apply one patch. Returns False if it was applied before."""
    original = inspect.getattr_static(patch.owner, patch.attribute)
    if hasattr(original, ORIGINAL_ATTRIBUTE):
        return False
    replacement = _wrapped(patch, original)
    setattr(replacement, ORIGINAL_ATTRIBUTE, original)
    setattr(patch.owner, patch.attribute, replacement)
    return True


def _wrapped(patch: Patch, original: Any) -> Any:
    """Return the replacement; a static method is replaced by a static method."""
    if isinstance(original, staticmethod):
        return staticmethod(patch.wrap(original.__func__))
    return patch.wrap(original)
