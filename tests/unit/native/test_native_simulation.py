"""The native simulator against one in plain Python, step by step and request by request."""

from dataclasses import replace

import pytest
from helpers.strategies.simulation_comparison import difference, scenarios, workloads
from hypothesis import given, settings

from equipoise.balancer.requests.rules import RULES
from equipoise.balancer.requests.simulation import Scenario
from equipoise.balancer.requests.workload import Workload

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=40)
@given(workload=workloads(), scenario=scenarios())
def test_native_simulation_equals_python_specification(
    name: str, workload: Workload, scenario: Scenario
) -> None:
    chosen = replace(scenario, policy=replace(scenario.policy, name=name))
    assert difference(workload, chosen) is None
