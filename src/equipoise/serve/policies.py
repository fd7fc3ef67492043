"""Policies by name."""

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

from equipoise.balancer.requests.policy import Policy
from equipoise.hal.errors import UsageError


class PolicyFactory(Protocol):
    """Makes a policy over workers; they are numbered in the order of the arguments."""

    def __call__(self, slots: Sequence[int], rooms: Sequence[int | None]) -> Policy:
        """`slots`: requests that each has at once; `rooms`: tokens that each has, None: any."""
        ...


NAMED: dict[str, PolicyFactory] = {}
"""Those that ship with the package."""


def factory_of(name: str) -> PolicyFactory:
    """A name, or PACKAGE:OBJECT.

    Raises: UsageError where there is no such policy, or it does not import.
    """
    if ":" not in name:
        if name not in NAMED:
            known = ", ".join(sorted(NAMED)) or "none"
            raise UsageError(f"--policy: unknown name {name!r}; known: {known}, PACKAGE:OBJECT")
        return NAMED[name]
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except Exception as error:
        # The user's own module may fail to import in any way it likes.
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"--policy: {name!r} does not import: {reason}") from error
    if not callable(found):
        raise UsageError(f"--policy: {name!r} cannot be called")
    return cast(PolicyFactory, found)
