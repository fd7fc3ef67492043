"""Small simulations, and results that can be worked out by hand."""

from collections.abc import Callable, Sequence

import pytest

from equipoise.balancer.requests.policy_comparison import NamedPolicy, PolicyResult
from equipoise.balancer.requests.policy_settings import RoutingPolicySettings
from equipoise.balancer.requests.simulation_run import SimulationMetrics
from equipoise.cli.simulate import SimulateRequest, run_simulation
from equipoise.report.simulation.result import SimulationResult


def small(**options: object) -> SimulationResult:
    """Run a small simulation; it takes a fraction of a second."""
    default_options: dict[str, object] = {
        "workload": "sharegpt", "requests": 80, "workers": 3, "slots_per_worker": 4, "seeds": 2,
        "policies": ("round_robin", "br0", "fit"), "quiet": True,
    }  # fmt: skip
    return run_simulation(SimulateRequest(**(default_options | options)))  # type: ignore[arg-type]


def result(label: str, figure: str, values: Sequence[float]) -> PolicyResult:
    """A result whose figures are all 1, except `figure`."""
    ones = dict.fromkeys(SimulationMetrics.names(), 1.0)
    runs = tuple(SimulationMetrics(**ones | {figure: value}) for value in values)
    return PolicyResult(NamedPolicy(label, RoutingPolicySettings()), runs)


@pytest.fixture(scope="package")
def simulation_result() -> SimulationResult:
    return small()


@pytest.fixture
def simulate_small() -> Callable[..., SimulationResult]:
    return small


@pytest.fixture
def make_result() -> Callable[..., PolicyResult]:
    return result
