"""The comparison of the native simulator with its specification notices every broken rule."""

import pytest
from helpers.mutants.simulation_mutants import MUTANTS, SimulationMutant
from helpers.strategies.simulated import difference, differs, drawn_of

from equipoise.balancer.requests.simulation import simulate

CASES = 60


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.broken)
def test_the_comparison_rejects(mutant: SimulationMutant) -> None:
    assert any(noticed(mutant, seed) for seed in range(CASES)), f"nobody noticed: {mutant.broken}"


def noticed(mutant: SimulationMutant, seed: int) -> bool:
    workload, scenario = drawn_of(seed)
    native = simulate(workload, scenario)
    try:
        return differs(native, mutant.run(workload, scenario)) is not None
    except KeyError:  # a front end does not know of whom it speaks
        return True


def test_the_specification_as_it_is_is_kept_on_the_same_cases() -> None:
    assert [difference(*drawn_of(seed)) for seed in range(CASES)] == [None] * CASES
