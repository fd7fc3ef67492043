"""Shares against the optimum that HiGHS finds for the same linear program."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, csr_matrix

from equipoise.balancer.experts import plan

CLOSE = 1e-3
"""Of the mean: what the peak may be above the optimum."""


def optimum(load: NDArray[np.int64], placement: NDArray[np.int32], ranks: int) -> float:
    """The lowest max/mean - 1 that any shares of this placement reach: one variable a slot."""
    slots = placement.size
    rank = np.arange(slots) // (slots // ranks)
    peak = np.full(ranks, -load.sum() / ranks)
    rows = coo_matrix((load[placement], (rank, np.arange(slots))), shape=(ranks, slots + 1))
    rows = csr_matrix(rows + coo_matrix((peak, (np.arange(ranks), np.full(ranks, slots))),
                                        shape=rows.shape))  # fmt: skip
    whole = csr_matrix(
        (np.ones(slots), (placement, np.arange(slots))), shape=(load.size, slots + 1)
    )
    cost = np.zeros(slots + 1)
    cost[-1] = 1.0
    found = linprog(
        cost,
        A_ub=rows,
        b_ub=np.zeros(ranks),
        A_eq=whole,
        b_eq=np.ones(load.size),
        bounds=(0, None),
        method="highs",
    )
    assert found.success
    return float(found.fun) - 1.0


@pytest.mark.parametrize("policy", ["greedy", "connected"])
@pytest.mark.parametrize(
    ("experts", "slots", "ranks"), [(6, 8, 4), (16, 20, 5), (64, 80, 16), (256, 320, 64)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_shares_reach_the_optimum(
    policy: str, experts: int, slots: int, ranks: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    load = rng.poisson(500 * np.exp(1.2 * rng.standard_normal((1, experts)))).astype(np.int64)
    found = plan(load, slots=slots, ranks=ranks, policy=policy)
    best = optimum(load[0], found.placement[0], ranks)
    assert best - 1e-6 <= found.predicted_imbalance <= best + CLOSE
