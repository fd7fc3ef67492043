"""What chance leaves: imbalance of rows thrown on ranks without preference, for any number."""

import math

import numpy as np

from equipoise.report.noise import noise_floor

EXACT_RANKS = 16
"""Up to which the rows' fixed sum is heeded; beyond, counts of ranks are as good as independent."""
TAIL = 12.0
"""Standard deviations above the mean that a count hardly ever passes."""


def floor(rows: int, ranks: int) -> float:
    """Expected max/mean - 1 of `rows` rows thrown uniformly on `ranks` ranks.

    Up to `EXACT_RANKS` as `noise_floor` says. Beyond, the largest of independent Poisson counts:
    the sum over m of 1 - F(m)^ranks, where F is their distribution.
    """
    if ranks <= EXACT_RANKS:
        return noise_floor(rows, ranks)
    mean = rows / ranks
    most = math.ceil(mean + TAIL * math.sqrt(mean) + TAIL**2)
    low = max(0, math.floor(mean - TAIL * math.sqrt(mean)))
    # Counts below `low` have next to no probability: there the largest is surely above.
    counts = np.arange(low, most)
    logs = counts * math.log(mean) - mean - np.array([math.lgamma(m + 1) for m in counts])
    below = np.minimum(np.cumsum(np.exp(logs)), 1.0)
    return float(low + (1.0 - below**ranks).sum()) / mean - 1.0
