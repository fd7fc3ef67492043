"""Small simulations, and results that can be worked out by hand."""

from collections.abc import Callable, Sequence

import pytest

from equipoise.balancer.requests.policy_comparison import Contender, Result
from equipoise.balancer.requests.policy_settings import PolicySettings
from equipoise.balancer.requests.simulation_run import Figures
from equipoise.cli.simulate import SimulateRequest, simulated
from equipoise.report.simulation.result import Simulated


def small(**said: object) -> Simulated:
    """Real, of a fraction of a second."""
    wanted: dict[str, object] = {
        "workload": "sharegpt", "requests": 80, "workers": 3, "slots_per_worker": 4, "seeds": 2,
        "policies": ("round_robin", "br0", "fit"), "progress": "hidden",
    }  # fmt: skip
    return simulated(SimulateRequest(**(wanted | said)))  # type: ignore[arg-type]


def result(label: str, figure: str, values: Sequence[float]) -> Result:
    """All figures 1, but one."""
    ones = dict.fromkeys(Figures.names(), 1.0)
    runs = tuple(Figures(**ones | {figure: value}) for value in values)
    return Result(Contender(label, PolicySettings()), runs)


@pytest.fixture(scope="package")
def found() -> Simulated:
    return small()


@pytest.fixture
def simulate_small() -> Callable[..., Simulated]:
    return small


@pytest.fixture
def make_result() -> Callable[..., Result]:
    return result
