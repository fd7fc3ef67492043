"""Creates the policy of `dp_load_balancer` from its settings and the capacity of the ranks."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from equipoise.balancer.requests.policy import RoutingPolicy
from equipoise.balancer.requests.policy_factory import PolicyFactory, routing_policy_factory
from equipoise.balancer.requests.policy_settings import POLICIES, Binding, WhenFull
from equipoise.hal.errors import ConfigError, UsageError
from equipoise.integrations.vllm.settings import DpLoadBalancerSettings

RESERVED_OPTIONS = ("front_ends", "front_end")
"""Policy options that cannot be set: all API servers share one policy."""


@dataclass(frozen=True)
class RankCapacity:
    """Capacity of the ranks that one client routes to; the same for all.

    Attributes:
        count: number of ranks; numbered as in vLLM.
        slots: requests that a rank runs at once.
        kv_cache_tokens: size of a rank's KV cache in tokens, as vLLM reports it; None: unknown.
        kv_token_limit: tokens that the policy may place on a rank; None: no limit.
    """

    count: int
    slots: int
    kv_cache_tokens: int | None
    kv_token_limit: int | None


def rank_capacity(config: Any, count: int, settings: DpLoadBalancerSettings) -> RankCapacity:
    """Read the capacity of `count` ranks from vLLM's configuration, once they are ready.

    With prefix caching prompts share tokens, which the policy would count for each. Then it gets no
    token limit, unless the settings have one.
    """
    cache = config.cache_config
    cache_tokens = getattr(cache, "kv_cache_size_tokens", None)
    if cache_tokens is None and cache.num_gpu_blocks:
        cache_tokens = cache.num_gpu_blocks * cache.block_size // count  # blocks of all ranks
    token_limit = None if getattr(cache, "enable_prefix_caching", False) else cache_tokens
    return RankCapacity(
        count=count,
        slots=settings.slots or int(config.scheduler_config.max_num_seqs),
        kv_cache_tokens=None if cache_tokens is None else int(cache_tokens),
        kv_token_limit=settings.kv_tokens or token_limit,
    )


def policy_factory(settings: DpLoadBalancerSettings) -> PolicyFactory:
    """Return the factory of the policy, once it has made one for two ranks.

    What a third-party factory makes is known only when it is called: here, before there is an
    engine.

    Raises `ConfigError` if the policy does not exist, its options are invalid, or its factory makes
    no policy.
    """
    factory = _find_factory(settings)
    with _errors_of_settings():
        factory([1, 1], [None, None])
    return factory


def make_policy(settings: DpLoadBalancerSettings, ranks: RankCapacity) -> RoutingPolicy:
    """Create the policy. Raises `ConfigError` as `policy_factory`."""
    factory = _find_factory(settings)
    with _errors_of_settings():
        return factory([ranks.slots] * ranks.count, [ranks.kv_token_limit] * ranks.count)


def _find_factory(settings: DpLoadBalancerSettings) -> PolicyFactory:
    options = dict(settings.policy_options or {})
    reserved = sorted(set(options) & set(RESERVED_OPTIONS))
    if reserved:
        raise ConfigError(
            f"dp_load_balancer: {', '.join(reserved)}: all API servers share one policy"
        )
    with _errors_of_settings():
        return routing_policy_factory(settings.policy, options)


@contextmanager
def _errors_of_settings() -> Iterator[None]:
    """Turn errors that name flags of our command line into `ConfigError`s that name settings."""
    try:
        yield
    except UsageError as error:
        message = (
            str(error).replace("--policy-options", "policy_options").replace("--policy", "policy")
        )
        raise ConfigError(f"dp_load_balancer: {message}") from error


def may_hold_requests(settings: DpLoadBalancerSettings) -> bool:
    """Whether the policy may queue requests at the front end; assumed of third-party policies."""
    options: Mapping[str, Any] = settings.policy_options or {}
    known_policy = POLICIES.get(settings.policy)
    if known_policy is None or known_policy.binding is Binding.POOL:
        return True
    return bool(options.get("when_full", WhenFull.HOLD.value) == WhenFull.HOLD.value)
