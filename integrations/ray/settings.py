"""Settings of the router, as `request_router_kwargs` has them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from equipoise.balancer.requests.policy_factory import PolicyFactory, routing_policy_factory
from equipoise.integrations.ray.request_sizes import RequestSize, load_request_size

ROUTER_CLASS = "equipoise.integrations.ray.router:EquipoiseRequestRouter"
"""For `request_router_class`."""


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

    Raises UsageError for a policy, an option or a function that there is not.
    """
    options = dict(policy_options or {})
    if ":" not in policy:
        options.setdefault("lockstep", False)
    return RouterSettings(routing_policy_factory(policy, options), load_request_size(request_size))


def request_router_config(
    policy: str = "fit",
    policy_options: Mapping[str, Any] | None = None,
    request_size: str | None = None,
    **ray_settings: Any,
) -> Any:
    """A `RequestRouterConfig` of Ray Serve with this router; the arguments of `router_settings`.

    Raises UsageError as `router_settings`, here rather than in every process that has a handle.
    """
    router_settings(policy, policy_options, request_size)
    from ray.serve.config import RequestRouterConfig

    return RequestRouterConfig(
        request_router_class=ROUTER_CLASS,
        request_router_kwargs={
            "policy": policy,
            "policy_options": dict(policy_options or {}),
            "request_size": request_size,
        },
        **ray_settings,
    )
