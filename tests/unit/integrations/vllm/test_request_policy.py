"""Which policy routes, over what ranks, and what of an engine's configuration it cannot serve."""

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.fakes.fake_core_client import configuration, deploy
from helpers.fakes.late_binding_policy import LateBinding

from equipoise.balancer.requests.router import RequestRouter
from equipoise.balancer.requests.rules import RULES, WhenFull
from equipoise.hal.errors import ConfigError
from equipoise.integrations.vllm.request_policy import holds, ranks_of
from equipoise.integrations.vllm.requests_part import RUST, contradictions, prepare
from equipoise.integrations.vllm.settings import RoutingSettings, settings_of


def engine(**cache: Any) -> SimpleNamespace:
    found = configuration(8)
    vars(found.cache_config).update(cache)
    return found


def test_ranks_of_reads_slots_and_cache_size_from_config() -> None:
    ranks = ranks_of(engine(enable_prefix_caching=False), 4, RoutingSettings())
    assert (ranks.count, ranks.slots, ranks.kv_tokens, ranks.room) == (4, 8, 1000, 1000)


def test_ranks_of_has_no_room_with_prefix_caching() -> None:
    ranks = ranks_of(engine(), 2, RoutingSettings())
    assert (ranks.kv_tokens, ranks.room) == (1000, None)


def test_ranks_of_derives_room_from_block_count() -> None:
    given = engine(kv_cache_size_tokens=None, num_gpu_blocks=80, enable_prefix_caching=False)
    assert ranks_of(given, 4, RoutingSettings()).room == 80 * 16 // 4
    nothing = engine(kv_cache_size_tokens=None, enable_prefix_caching=False)
    assert ranks_of(nothing, 4, RoutingSettings()).room is None


def test_routing_settings_override_engine_defaults() -> None:
    ranks = ranks_of(engine(), 2, RoutingSettings(slots=3, room=77))
    assert (ranks.slots, ranks.room) == (3, 77)


@pytest.mark.parametrize("name", list(RULES))
def test_routing_policy_is_told_number_of_api_servers(name: str) -> None:
    for index, client in enumerate(deploy(2, 3, 2, policy=name).clients):
        policy = client.desk.policy
        assert isinstance(policy, RequestRouter)
        assert (policy.settings.front_ends, policy.settings.front_end) == (2, index)
        assert policy.settings.when_full is WhenFull.HOLD
        assert len(policy.states) == 3


def test_routing_options_reach_the_policy() -> None:
    [client] = deploy(2, 2, policy="fit", options={"window": 7}).clients
    assert isinstance(client.desk.policy, RequestRouter)
    assert client.desk.policy.settings.window == 7


def test_third_party_policy_is_constructed_from_slots() -> None:
    [client] = deploy(2, 2, policy="helpers.fakes.late_binding_policy:LateBinding").clients
    assert isinstance(client.desk.policy, LateBinding)


def switch_on(routing: object) -> None:
    """As the plugin does, as far as it needs no engine."""
    asked = settings_of({"equipoise": {"routing": routing}}, {})
    assert asked is not None
    assert asked.routing is not None
    prepare(asked.routing)


@pytest.mark.parametrize(
    ("routing", "words"),
    [
        ("fitt", "policy: unknown name 'fitt'; known: random"),
        ({"options": {"windw": 1}}, "options: unknown option 'windw'"),
        ({"options": {"front_ends": 2}}, "front_ends: the number of API servers says that"),
        ({"policy": "os:sep"}, "policy: 'os:sep' cannot be called"),
        ({"options": {"window": -1}}, "policy fit: window: expected at least 1"),
        ({"slots": 0}, "slots must be a whole number from 1"),
        ({"room": 1.5}, "room must be a whole number from 1"),
        ({"hold_seconds": -1}, "hold_seconds must be a number from 0"),
        ({"hold": 1}, "unknown hold; options are policy, options, hold_seconds"),
    ],
)
def test_routing_settings_are_refused_before_engine_starts(routing: object, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        switch_on(routing)
    assert words in str(refused.value)
    assert "--policy" not in str(refused.value)


def configured(**parallel: Any) -> SimpleNamespace:
    known = {
        "data_parallel_size": 2,
        "data_parallel_external_lb": False,
        "enable_elastic_ep": False,
    }
    scheduler = SimpleNamespace(policy=parallel.pop("policy", "fcfs"))
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**known | parallel), scheduler_config=scheduler
    )


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"data_parallel_size": 1}, "--data-parallel-size"),
        ({"data_parallel_external_lb": True}, "external load balancer"),
        ({"enable_elastic_ep": True}, "elastic"),
        ({"policy": "priority"}, "--scheduling-policy priority"),
    ],
)
def test_routing_contradiction_names_unsupported_engine_option(parallel: Any, words: str) -> None:
    [found] = contradictions(configured(**parallel), RoutingSettings(), {})
    assert words in found


def test_routing_contradiction_names_rust_front_end() -> None:
    [found] = contradictions(configured(), RoutingSettings(), {RUST: "1"})
    assert RUST in found
    assert contradictions(configured(), RoutingSettings(), {RUST: "0"}) == []


def test_routing_policy_without_holding_allows_priority_scheduling() -> None:
    pushing = RoutingSettings(policy="jsq", options={"when_full": "queue"})
    assert not holds(pushing)
    assert contradictions(configured(policy="priority"), pushing, {}) == []
    assert holds(RoutingSettings(policy="jsq"))
    assert holds(RoutingSettings(policy="package:object"))
    assert holds(RoutingSettings(policy="br0", options={"when_full": "queue"}))
