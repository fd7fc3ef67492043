"""The optimum of shares, found by HiGHS from the linear program: what planners are held to."""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, csr_matrix

Counts = NDArray[np.int64]


def optimum(load: Counts, placement: NDArray[np.int32], ranks: int) -> float:
    """The lowest max/mean - 1 that any shares of this placement reach, for one layer.

    One variable a slot, its part of its expert, and one for the peak. `load` is (experts,),
    `placement` (slots,). Raises `ArithmeticError` when HiGHS finds none.
    """
    slots = placement.size
    rank = np.arange(slots) // (slots // ranks)
    peak = np.full(ranks, -load.sum() / ranks)
    slot_loads = coo_matrix((load[placement], (rank, np.arange(slots))), shape=(ranks, slots + 1))
    level = coo_matrix((peak, (np.arange(ranks), np.full(ranks, slots))), shape=slot_loads.shape)
    expert_sums = (np.ones(slots), (placement, np.arange(slots)))
    cost = np.zeros(slots + 1)
    cost[-1] = 1.0
    solution = linprog(
        cost,
        A_ub=csr_matrix(slot_loads + level),
        b_ub=np.zeros(ranks),
        A_eq=csr_matrix(expert_sums, shape=(load.size, slots + 1)),
        b_eq=np.ones(load.size),
        bounds=(0, None),
        method="highs",
    )
    if not solution.success:
        raise ArithmeticError(f"HiGHS: {solution.message}")
    return float(solution.fun) - 1.0


def optima(load: Counts, placement: NDArray[np.int32], ranks: int) -> NDArray[np.float64]:
    """(layers,): the same for every layer of (layers, experts) and (layers, slots)."""
    pairs = zip(load, placement, strict=True)
    return np.array([optimum(rows, slots, ranks) for rows, slots in pairs])
