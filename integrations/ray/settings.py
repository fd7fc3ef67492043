"""Settings of the router, as `request_router_kwargs` has them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from equipoise.balancer.requests.policy_factory import PolicyFactory, routing_policy_factory
from equipoise.hal.errors import UsageError
from equipoise.integrations.ray.request_sizes import RequestSize, load_request_size

ROUTER_CLASS = "equipoise.integrations.ray.router:EquipoiseRequestRouter"
"""For `request_router_class`."""
SET_HERE = ("request_router_class", "request_router_kwargs")
"""Fields of a `RequestRouterConfig` that `request_router_config` fills in."""
FLAG = re.compile(r"--(policy(?:-options)?)\b(?!-)")


@dataclass(frozen=True)
class RouterSettings:
    """What a router is made of.

    Attributes:
        factory: makes the policy.
        request_size: estimates the prompt tokens of a call.
    """

    factory: PolicyFactory
    request_size: RequestSize


def router_settings(
    policy: str = "fit",
    policy_options: Mapping[str, Any] | None = None,
    request_size: str | None = None,
) -> RouterSettings:
    """Reads the settings.

    Args:
        policy: a name of `POLICIES`, or PACKAGE:OBJECT.
        policy_options: its settings. `lockstep` is false where it is not given: replicas do not
            wait for each other, and nobody says when a step is over.
        request_size: PACKAGE:OBJECT, a function of the arguments of a call; None: `prompt_tokens`.

    Raises UsageError for an argument of the wrong type, for a policy, an option or a function that
    there is not, and for a policy that cannot be created.
    """
    if not isinstance(policy, str):
        raise UsageError(f"policy has to be a name or PACKAGE:OBJECT, got {policy!r}")
    if not isinstance(policy_options, Mapping | None):
        raise UsageError(f"policy_options has to be a mapping, got {policy_options!r}")
    if not isinstance(request_size, str | None):
        raise UsageError(f"request_size has to be PACKAGE:OBJECT, got {request_size!r}")
    options = dict(policy_options or {})
    if ":" not in policy:
        options.setdefault("lockstep", False)
    try:
        factory = routing_policy_factory(policy, options)
        # What a user's factory returns is known only when it is called.
        factory([1], [None])
    except UsageError as error:
        # It names the flags of a command line, which are keyword arguments here.
        raise UsageError(FLAG.sub(_argument_name, str(error))) from error
    return RouterSettings(factory, load_request_size(request_size))


def request_router_config(
    policy: str = "fit",
    policy_options: Mapping[str, Any] | None = None,
    request_size: str | None = None,
    **ray_settings: Any,
) -> Any:
    """A `RequestRouterConfig` of Ray Serve with this router; the arguments of `router_settings`.

    Args:
        ray_settings: other fields of a `RequestRouterConfig`.

    Raises UsageError as `router_settings`, here rather than in every process that has a handle, and
    for a setting that Ray does not have, which Ray would ignore. Ray raises its own error for a
    value that it refuses.
    """
    router_settings(policy, policy_options, request_size)
    from ray.serve.config import RequestRouterConfig

    own = ("policy", "policy_options", "request_size")
    known = [*own, *(name for name in RequestRouterConfig.model_fields if name not in SET_HERE)]
    for name in ray_settings:
        if name in SET_HERE:
            raise UsageError(f"{name} is set here: give {', '.join(own)} instead")
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise UsageError(f"unknown setting {name!r}; {hint}")
    return RequestRouterConfig(
        request_router_class=ROUTER_CLASS,
        request_router_kwargs={
            "policy": policy,
            "policy_options": dict(policy_options or {}),
            "request_size": request_size,
        },
        **ray_settings,
    )


def _argument_name(flag: re.Match[str]) -> str:
    return flag[1].replace("-", "_")
