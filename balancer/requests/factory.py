"""Policies by name."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum
from importlib import import_module
from typing import Any, Protocol, cast

from equipoise.balancer.requests.policy import Capacity, Policy
from equipoise.balancer.requests.router import RequestRouter
from equipoise.balancer.requests.rules import RULES, PolicySettings, WhenFull
from equipoise.hal.errors import PolicyError, UsageError

EVENTS = ("on_arrival", "on_tokens", "on_finish", "on_abort", "on_worker_change")


class PolicyFactory(Protocol):
    """Makes a policy over workers; they are numbered in the order of the arguments."""

    def __call__(self, slots: Sequence[int], rooms: Sequence[int | None]) -> Policy:
        """`slots`: requests that each has at once; `rooms`: tokens that each has, None: any."""
        ...


def factory_of(name: str, options: Mapping[str, object]) -> PolicyFactory:
    """A name of `RULES`, set by `options`, or PACKAGE:OBJECT, which takes none.

    A policy that pushes holds what comes while all workers are full, unless it is told otherwise:
    what is bound to a full worker could not be moved any more.

    Raises: UsageError where there is no such policy, or it cannot be set so.
    """
    if ":" not in name:
        return _native(name, options)
    if options:
        raise UsageError(f"--policy-options are for policies by name, not for {name!r}")
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except Exception as error:
        # The user's own module may fail to import in any way it likes.
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"--policy: {name!r} does not import: {reason}") from error
    if not callable(found):
        raise UsageError(f"--policy: {name!r} cannot be called")
    return _foreign(name, cast(PolicyFactory, found))


def _foreign(name: str, found: PolicyFactory) -> PolicyFactory:
    """`found`, whose mistakes are its user's to mend. What is made raises UsageError."""

    def make(slots: Sequence[int], rooms: Sequence[int | None]) -> Policy:
        try:
            policy = found(slots, rooms)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise UsageError(f"--policy: {name!r} makes no policy: {reason}") from error
        for event in EVENTS:
            if not callable(getattr(policy, event, None)):
                raise UsageError(f"--policy: what {name!r} makes is no policy: it has no {event}")
        return policy

    return make


def _native(name: str, options: Mapping[str, object]) -> PolicyFactory:
    if name not in RULES:
        known = ", ".join(RULES)
        raise UsageError(f"--policy: unknown name {name!r}; known: {known}, PACKAGE:OBJECT")
    settings = settings_of(name, options)

    def make(slots: Sequence[int], rooms: Sequence[int | None]) -> Policy:
        pairs = zip(slots, rooms, strict=True)
        return RequestRouter(settings, [Capacity(slots=n, kv_tokens=room) for n, room in pairs])

    try:
        make([1], [None])  # what cannot be set so is said before anything listens
    except PolicyError as error:
        raise UsageError(f"--policy {name}: {error}") from error
    return make


def settings_of(name: str, options: Mapping[str, object]) -> PolicySettings:
    """Raises UsageError for an option that policies do not have, or that is set here."""
    known = {one.name: one.default for one in fields(PolicySettings) if one.name != "name"}
    values: dict[str, Any] = {"when_full": WhenFull.HOLD}
    for key, value in options.items():
        if key not in known:
            raise UsageError(f"--policy-options: unknown option {key!r}; known: {', '.join(known)}")
        values[key] = _fitting(key, value, known[key])
    return PolicySettings(name=name, **values)


def _fitting(key: str, value: Any, default: object) -> object:
    """`value` as the default is. Raises UsageError."""
    kind: Any = type(default)
    try:
        if isinstance(default, Enum):
            return kind(value)
        if isinstance(value, bool) or (kind is int and isinstance(value, float)):
            raise ValueError(value)
        return kind(value)
    except (ValueError, TypeError):
        choices = [str(one.value) for one in kind] if issubclass(kind, Enum) else [kind.__name__]
        wanted = " or ".join(choices)
        raise UsageError(f"--policy-options: {key} has to be {wanted}, got {value!r}") from None
