"""The policy that routes requests, made of what is asked for and of what an engine's ranks hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from equipoise.balancer.requests.policy import RoutingPolicy
from equipoise.balancer.requests.policy_factory import PolicyFactory, routing_policy_factory
from equipoise.balancer.requests.policy_settings import POLICIES, Binding, WhenFull
from equipoise.hal.errors import ConfigError, UsageError
from equipoise.integrations.vllm.settings import DpLoadBalancerSettings

RESERVED_OPTIONS = ("front_ends", "front_end")
"""Options of a policy that the engine's configuration says."""


@dataclass(frozen=True)
class RankCapacity:
    """The ranks that one client routes to; all alike.

    Attributes:
        count: of them; numbered as the engine numbers them.
        max_running: requests that each has at once.
        kv_cache_tokens: tokens in the KV cache of each, as the engine says; None: it did not.
        kv_token_limit: the same, as far as the policy is to keep to it; None: not at all.
    """

    count: int
    max_running: int
    kv_cache_tokens: int | None
    kv_token_limit: int | None


def rank_capacity(config: Any, count: int, settings: DpLoadBalancerSettings) -> RankCapacity:
    """What the engine's configuration says of `count` ranks, once these are ready.

    Where the engine keeps prefixes, prompts share tokens that the policy would count for each: it
    is told of no room then, unless the settings give one.
    """
    cache = config.cache_config
    cache_tokens = getattr(cache, "kv_cache_size_tokens", None)
    if cache_tokens is None and cache.num_gpu_blocks:
        cache_tokens = cache.num_gpu_blocks * cache.block_size // count  # blocks of all ranks
    token_limit = None if getattr(cache, "enable_prefix_caching", False) else cache_tokens
    return RankCapacity(
        count=count,
        max_running=settings.max_running or int(config.scheduler_config.max_num_seqs),
        kv_cache_tokens=None if cache_tokens is None else int(cache_tokens),
        kv_token_limit=settings.kv_token_capacity or token_limit,
    )


def policy_factory(
    settings: DpLoadBalancerSettings, clients: int = 1, client: int = 0
) -> PolicyFactory:
    """Makes the policy of one of `clients` API servers.

    Raises `ConfigError` where there is no such policy, or it cannot be set so.
    """
    options = dict(settings.options or {})
    reserved = sorted(set(options) & set(RESERVED_OPTIONS))
    if reserved:
        raise ConfigError(
            f"dp_load_balancer: {', '.join(reserved)}: the number of API servers says that"
        )
    if ":" not in settings.policy:
        options |= {"front_ends": clients, "front_end": client}
    try:
        return routing_policy_factory(settings.policy, options)
    except UsageError as error:
        message = str(error).replace("--policy-options", "options").replace("--policy", "policy")
        raise ConfigError(f"dp_load_balancer: {message}") from error


def make_policy(
    settings: DpLoadBalancerSettings, ranks: RankCapacity, clients: int, client: int
) -> RoutingPolicy:
    """Raises `ConfigError`, as `factory`, and `UsageError` where another's makes none."""
    factory = policy_factory(settings, clients, client)
    return factory([ranks.max_running] * ranks.count, [ranks.kv_token_limit] * ranks.count)


def may_hold_requests(settings: DpLoadBalancerSettings) -> bool:
    """Whether a request may wait at the front end; of another's policy it is assumed."""
    options: Mapping[str, Any] = settings.options or {}
    known_policy = POLICIES.get(settings.policy)
    if known_policy is None or known_policy.binding is Binding.POOL:
        return True
    return bool(options.get("when_full", WhenFull.HOLD.value) == WhenFull.HOLD.value)
