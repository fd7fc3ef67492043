"""Which policy routes, over what ranks, and what of an engine's configuration it cannot serve."""

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.fakes.fake_core_client import asked, configuration, deploy, turn
from helpers.fakes.late_binding_policy import LateBinding
from helpers.harnesses.request_routing_scenario import run

from equipoise.balancer.requests.policy_settings import POLICIES, WhenFull
from equipoise.balancer.requests.request_router import RequestRouter
from equipoise.hal.errors import ConfigError
from equipoise.integrations.vllm.dp.core_client import (
    RUST_FRONTEND_VARIABLE,
    dp_config_errors,
    prepare,
)
from equipoise.integrations.vllm.dp.policy import may_hold_requests, rank_capacity
from equipoise.integrations.vllm.settings import DpLoadBalancerSettings, parse_settings


def engine(**cache: Any) -> SimpleNamespace:
    config = configuration(8)
    vars(config.cache_config).update(cache)
    return config


def test_ranks_of_reads_slots_and_cache_size_from_config() -> None:
    ranks = rank_capacity(engine(enable_prefix_caching=False), 4, DpLoadBalancerSettings())
    assert (ranks.count, ranks.slots, ranks.kv_cache_tokens, ranks.kv_token_limit) == (
        4,
        8,
        1000,
        1000,
    )


def test_ranks_of_has_no_room_with_prefix_caching() -> None:
    ranks = rank_capacity(engine(), 2, DpLoadBalancerSettings())
    assert (ranks.kv_cache_tokens, ranks.kv_token_limit) == (1000, None)


def test_ranks_of_derives_room_from_block_count() -> None:
    config = engine(kv_cache_size_tokens=None, num_gpu_blocks=80, enable_prefix_caching=False)
    assert rank_capacity(config, 4, DpLoadBalancerSettings()).kv_token_limit == 80 * 16 // 4
    nothing = engine(kv_cache_size_tokens=None, enable_prefix_caching=False)
    assert rank_capacity(nothing, 4, DpLoadBalancerSettings()).kv_token_limit is None


def test_routing_settings_override_engine_defaults() -> None:
    ranks = rank_capacity(engine(), 2, DpLoadBalancerSettings(slots=3, kv_tokens=77))
    assert (ranks.slots, ranks.kv_token_limit) == (3, 77)


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("name", list(POLICIES))
def test_api_servers_share_one_policy_that_sees_all(name: str, clients: int) -> None:
    async def work() -> None:
        setup = deploy(2, 3, clients, policy=name)
        await turn()
        policy = setup.policy
        assert isinstance(policy, RequestRouter)
        assert (policy.settings.front_ends, policy.settings.front_end) == (1, 0)
        assert policy.settings.when_full is WhenFull.HOLD
        assert len(policy.states) == 3
        for number, client in enumerate(setup.clients):
            await client.add_request_async(asked(f"r{number}"))
        await turn()
        assert sum(policy.counts) == clients

    run(work())


def test_routing_options_reach_the_policy() -> None:
    [client] = deploy(2, 2, policy="fit", policy_options={"window": 7}).clients
    assert isinstance(client.scheduler.policy, RequestRouter)
    assert client.scheduler.policy.settings.window == 7


def test_third_party_policy_is_constructed_from_slots() -> None:
    [client] = deploy(2, 2, policy="helpers.fakes.late_binding_policy:LateBinding").clients
    assert isinstance(client.scheduler.policy, LateBinding)


def switch_on(routing: object) -> None:
    """As the plugin does, as far as it needs no engine."""
    plugin_settings = parse_settings({"equipoise": {"dp_load_balancer": routing}}, {})
    assert plugin_settings is not None
    assert plugin_settings.dp_load_balancer is not None
    prepare(plugin_settings.dp_load_balancer)


@pytest.mark.parametrize(
    ("routing", "words"),
    [
        ("fitt", "policy: unknown name 'fitt'; known: random"),
        ({"policy_options": {"windw": 1}}, "policy_options: unknown option 'windw'"),
        ({"policy_options": {"front_ends": 2}}, "front_ends: all API servers share one policy"),
        ({"policy": "os:sep"}, "policy: 'os:sep' cannot be called"),
        ({"policy": "os:getcwd"}, "policy: 'os:getcwd' makes no policy: TypeError"),
        ({"policy": "builtins:zip"}, "policy: what 'builtins:zip' makes is no policy: it has no"),
        ({"policy_options": {"window": -1}}, "policy fit: window: expected at least 1"),
        ({"slots": 0}, "slots must be a whole number from 1"),
        ({"kv_tokens": 1.5}, "kv_tokens must be a whole number from 1"),
        ({"queue_timeout": -1}, "queue_timeout must be a number from 0"),
        ({"hold": 1}, "unknown hold; options are policy, policy_options, queue_timeout"),
    ],
)
def test_routing_settings_are_refused_before_engine_starts(routing: object, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        switch_on(routing)
    assert words in str(error.value)
    assert "--policy" not in str(error.value)


def engine_config(**parallel: Any) -> SimpleNamespace:
    parallel_options = {
        "data_parallel_size": 2,
        "data_parallel_external_lb": False,
        "enable_elastic_ep": False,
    }
    scheduler = SimpleNamespace(policy=parallel.pop("policy", "fcfs"))
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel_options | parallel), scheduler_config=scheduler
    )


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"data_parallel_size": 1}, "--data-parallel-size"),
        ({"data_parallel_external_lb": True}, "external load balancer"),
        ({"data_parallel_rank_local": 0}, "offline"),
        ({"enable_elastic_ep": True}, "elastic"),
        ({"policy": "priority"}, "--scheduling-policy priority"),
    ],
)
def test_routing_contradiction_names_unsupported_engine_option(parallel: Any, words: str) -> None:
    [message] = dp_config_errors(engine_config(**parallel), DpLoadBalancerSettings(), {})
    assert words in message


def test_routing_contradiction_names_rust_front_end() -> None:
    [message] = dp_config_errors(
        engine_config(), DpLoadBalancerSettings(), {RUST_FRONTEND_VARIABLE: "1"}
    )
    assert RUST_FRONTEND_VARIABLE in message
    assert (
        dp_config_errors(engine_config(), DpLoadBalancerSettings(), {RUST_FRONTEND_VARIABLE: "0"})
        == []
    )


def test_routing_policy_without_holding_allows_priority_scheduling() -> None:
    pushing = DpLoadBalancerSettings(policy="jsq", policy_options={"when_full": "queue"})
    assert not may_hold_requests(pushing)
    assert dp_config_errors(engine_config(policy="priority"), pushing, {}) == []
    assert may_hold_requests(DpLoadBalancerSettings(policy="jsq"))
    assert may_hold_requests(DpLoadBalancerSettings(policy="package:object"))
    assert may_hold_requests(
        DpLoadBalancerSettings(policy="br0", policy_options={"when_full": "queue"})
    )
