"""The comparison of native routers with the published rules notices every broken rule."""

from collections import Counter
from dataclasses import replace

import pytest
from helpers.harnesses.router_comparison import difference
from helpers.mutants.policy_mutants import MUTANTS, Mutant
from helpers.strategies.router_strategies import busy, starving

from equipoise.balancer.requests.policy_settings import POLICIES

CASES = 240


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.broken)
def test_router_comparison_rejects_mutant(mutant: Mutant) -> None:
    assert any(detects(mutant, seed) for seed in range(CASES)), f"nobody noticed: {mutant.broken}"


def detects(mutant: Mutant, seed: int) -> bool:
    case = starving if mutant.name == "fit" and seed % 4 == 3 else busy
    policy, workers, events = case(seed)
    mutant_policy = replace(policy, name=mutant.name)
    return difference(mutant_policy, workers, events, mutant.front) is not None


def test_router_mutants_cover_every_policy_once() -> None:
    assert {mutant.name for mutant in MUTANTS} == set(POLICIES)
    assert max(Counter(mutant.broken for mutant in MUTANTS).values()) == 1
