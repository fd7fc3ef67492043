"""Creates routing policies from a name and options."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum
from importlib import import_module
from typing import Any, Protocol, cast

from equipoise.balancer.requests.policy import Capacity, RoutingPolicy
from equipoise.balancer.requests.policy_settings import (
    OPTION_POLICIES,
    POLICIES,
    RoutingPolicySettings,
    WhenFull,
)
from equipoise.balancer.requests.request_router import RequestRouter
from equipoise.hal.errors import PolicyError, UsageError

SWITCHES = {"true": True, "false": False}
"""By the texts of a command line; `bool("false")` would be true."""
POLICY_METHODS = ("on_arrival", "on_tokens", "on_finish", "on_abort", "on_worker_change")


class PolicyFactory(Protocol):
    """Creates a policy for workers, which are numbered in the order of the arguments."""

    def __call__(self, slots: Sequence[int], kv_tokens: Sequence[int | None]) -> RoutingPolicy:
        """Creates a policy.

        Args:
            slots: maximum number of running requests, by worker.
            kv_tokens: KV cache in tokens, by worker; None: unlimited.
        """
        ...


def routing_policy_factory(name: str, options: Mapping[str, object]) -> PolicyFactory:
    """Returns the factory of a policy in `POLICIES`, or of PACKAGE:OBJECT, which takes no options.

    By default a push policy holds requests while all workers are full: a request that is bound to a
    full worker cannot move any more.

    Raises UsageError if there is no such policy, or it does not accept the options.
    """
    if ":" not in name:
        return _native_factory(name, options)
    if options:
        raise UsageError(f"--policy-options are for policies by name, not for {name!r}")
    module, _, attribute = name.partition(":")
    try:
        factory = getattr(import_module(module), attribute)
    except Exception as error:
        # The import runs the user's code, which may raise anything.
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"--policy: {name!r} does not import: {reason}") from error
    if not callable(factory):
        raise UsageError(f"--policy: {name!r} cannot be called")
    return _imported_factory(name, cast(PolicyFactory, factory))


def _imported_factory(name: str, factory: PolicyFactory) -> PolicyFactory:
    """Wraps a user's factory: an error in it becomes a UsageError that names the option."""

    def make(slots: Sequence[int], kv_tokens: Sequence[int | None]) -> RoutingPolicy:
        try:
            policy = factory(slots, kv_tokens)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise UsageError(f"--policy: {name!r} makes no policy: {reason}") from error
        for event in POLICY_METHODS:
            if not callable(getattr(policy, event, None)):
                raise UsageError(f"--policy: what {name!r} makes is no policy: it has no {event}")
        return policy

    return make


def _native_factory(name: str, options: Mapping[str, object]) -> PolicyFactory:
    if name not in POLICIES:
        names = ", ".join(POLICIES)
        raise UsageError(f"--policy: unknown name {name!r}; known: {names}, PACKAGE:OBJECT")
    settings = settings_of(name, options)

    def make(slots: Sequence[int], kv_tokens: Sequence[int | None]) -> RoutingPolicy:
        pairs = zip(slots, kv_tokens, strict=True)
        capacities = [Capacity(slots=n, kv_tokens=tokens) for n, tokens in pairs]
        return RequestRouter(settings, capacities, time.monotonic)

    try:
        make([1], [None])  # refuses bad options before any socket is opened
    except PolicyError as error:
        raise UsageError(f"--policy {name}: {error}") from error
    return make


def settings_of(name: str, options: Mapping[str, object]) -> RoutingPolicySettings:
    """Builds settings from options. Raises UsageError for an unknown option or a bad value."""
    defaults = {
        field.name: field.default for field in fields(RoutingPolicySettings) if field.name != "name"
    }
    values: dict[str, Any] = {"when_full": WhenFull.HOLD}
    for key, value in options.items():
        if key not in defaults:
            raise UsageError(
                f"--policy-options: unknown option {key!r}; known: {', '.join(defaults)}"
            )
        values[key] = _coerce(key, value, defaults[key])
        if name not in OPTION_POLICIES.get(key, (name,)):
            owners = ", ".join(OPTION_POLICIES[key])
            raise UsageError(f"--policy-options: {key} has no effect on {name}: it is for {owners}")
    if "prefill_wait" in values and values.get("prompt_weight") == 0:
        raise UsageError(
            "--policy-options: prefill_wait has no effect with prompt_weight 0: prompts are free"
        )
    if "prefill_wait" in values and values.get("lockstep") is False:
        raise UsageError(
            "--policy-options: prefill_wait has no effect with lockstep false: a prompt delays no "
            "other worker"
        )
    return RoutingPolicySettings(name=name, **values)


def _coerce(key: str, value: Any, default: object) -> object:
    """Converts `value` to the type of the default. Raises UsageError."""
    # `prompt_weight` alone has no default: unset, it is fitted.
    kind: Any = float if default is None else type(default)
    try:
        if isinstance(default, Enum):
            return kind(value)
        if kind is bool:
            return SWITCHES[str(value).lower()]
        if isinstance(value, bool) or (kind is int and isinstance(value, float)):
            raise ValueError(value)
        return kind(value)
    except (KeyError, ValueError, TypeError):
        if issubclass(kind, Enum):
            choices = [str(choice.value) for choice in kind]
        else:
            choices = list(SWITCHES) if kind is bool else [kind.__name__]
        expected = " or ".join(choices)
        raise UsageError(f"--policy-options: {key} has to be {expected}, got {value!r}") from None
