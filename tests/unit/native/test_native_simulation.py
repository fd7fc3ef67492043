"""The native simulator against one in plain Python, step by step and request by request."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.strategies.simulation_comparison import BLOCK, difference, scenarios, workloads
from hypothesis import given, settings

from equipoise.balancer.requests.cluster import Cluster, StepTime
from equipoise.balancer.requests.policy_settings import POLICIES, RoutingPolicySettings
from equipoise.balancer.requests.simulation import SaturatedArrivals, Scenario
from equipoise.balancer.requests.workload import Workload

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40)
@given(workload=workloads(), scenario=scenarios())
def test_native_simulation_equals_python_specification(
    name: str, workload: Workload, scenario: Scenario
) -> None:
    policy_scenario = replace(scenario, policy=replace(scenario.policy, name=name))
    assert difference(workload, policy_scenario) is None


@pytest.mark.parametrize("name", POLICIES)
def test_front_ends_are_not_told_of_preemption(name: str) -> None:
    """A request that is put back still has its tokens: its prompt does not count as pending."""
    prompts = [1, 26, 22, 1, 1, 1, 1, 17, 2, 1, 1, 1, 1, 1]
    workload = Workload(
        name="one is preempted while others are bound",
        arrivals=np.zeros(len(prompts)),
        prompts=np.array(prompts),
        outputs=np.array([2 if number in (2, 8) else 1 for number in range(len(prompts))]),
        hashes=None,
        block=BLOCK,
    )
    scenario = Scenario(
        cluster=Cluster(workers=2, slots=2, kv_tokens=25, step=StepTime(per_token=0.125)),
        policy=RoutingPolicySettings(name=name, prompt_weight=0.0),
        arrivals=SaturatedArrivals(None),
        queue_timeout=0.1,
        trajectory=1 << 20,
    )
    assert difference(workload, scenario) is None
