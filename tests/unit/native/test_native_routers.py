"""Native routers against the published rules in plain Python, decision by decision."""

from dataclasses import replace

import pytest
from helpers.harnesses.router_comparison import Draw, difference
from helpers.strategies.router_strategies import EVENTS, WORKERS, busy, choices, starving
from helpers.tiers import DEEP
from hypothesis import given, settings

from equipoise.balancer.requests.policy import Capacity
from equipoise.balancer.requests.policy_settings import POLICIES, RoutingPolicySettings

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40)
@given(policy=choices(), workers=WORKERS, events=EVENTS)
def test_native_router_equals_published_rule(
    name: str, policy: RoutingPolicySettings, workers: list[Capacity], events: list[Draw]
) -> None:
    assert difference(replace(policy, name=name), workers, events) is None


@pytest.mark.parametrize("name", POLICIES)
def test_busy_native_router_equals_published_rule(name: str) -> None:
    for seed in range(120 if DEEP else 60):
        policy, workers, events = busy(seed)
        assert difference(replace(policy, name=name), workers, events) is None, seed


def test_fit_equals_published_rule_while_a_large_request_starves() -> None:
    for seed in range(20):
        policy, workers, events = starving(seed)
        assert difference(policy, workers, events) is None, seed
