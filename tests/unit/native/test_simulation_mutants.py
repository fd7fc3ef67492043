"""The comparison of the native simulator with its specification notices every broken rule."""

import pytest
from helpers.mutants.simulation_mutants import MUTANTS, SimulationMutant
from helpers.strategies.simulation_comparison import difference, differs, drawn_of

from equipoise.balancer.requests.simulation import simulate

CASES = 60


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.broken)
def test_simulation_comparison_rejects_mutant(mutant: SimulationMutant) -> None:
    assert any(detects(mutant, seed) for seed in range(CASES)), f"nobody noticed: {mutant.broken}"


def detects(mutant: SimulationMutant, seed: int) -> bool:
    workload, scenario = drawn_of(seed)
    native = simulate(workload, scenario)
    try:
        return differs(native, mutant.run(workload, scenario)) is not None
    except KeyError:  # a front end does not know of whom it speaks
        return True


def test_simulation_comparison_accepts_healthy_specification() -> None:
    assert [difference(*drawn_of(seed)) for seed in range(CASES)] == [None] * CASES
