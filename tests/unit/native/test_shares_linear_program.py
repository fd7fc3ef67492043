"""Shares against the optimum that HiGHS finds for the same linear program."""

import numpy as np
import pytest
from helpers.references.linear_program import optimum

from equipoise.balancer.experts import plan

CLOSE = 1e-3
"""Of the mean: what the peak may be above the optimum."""


@pytest.mark.parametrize("policy", ["greedy", "connected"])
@pytest.mark.parametrize(
    ("experts", "slots", "ranks"), [(6, 8, 4), (16, 20, 5), (64, 80, 16), (256, 320, 64)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_plan_shares_reach_linear_program_optimum(
    policy: str, experts: int, slots: int, ranks: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    load = rng.poisson(500 * np.exp(1.2 * rng.standard_normal((1, experts)))).astype(np.int64)
    result = plan(load, slots=slots, ranks=ranks, policy=policy)
    best = optimum(load[0], result.placement[0], ranks)
    assert best - 1e-6 <= result.predicted_imbalance <= best + CLOSE
