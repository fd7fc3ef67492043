"""Detects when shares are worth solving again, and from which loads."""

from collections import deque
from dataclasses import replace

import numpy as np

from equipoise.balancer.experts.placement import (
    ExpertShape,
    Layout,
    Load,
    Shares,
    imbalance,
    solve_shares,
)

REMEMBERED_SUB_WINDOWS = 5
"""Number of remembered errors: a median of five ignores the two that a switch spoils."""
MAX_SUMMED_ROWS = 2**45
"""Rows of a layer above which all counts are halved: the solver takes less than 2**46."""
DEVIATIONS = 2
"""How far above the median chance may reach, in distances of the least error from it."""


class DriftDetector:
    """Distinguishes a change of traffic from the noise of a sub-window.

    Shares that are solved from a sub-window always look better on the same sub-window: they fit its
    noise. So their quality is measured on the next sub-window. While the installed shares are as
    good as such fresh ones, within their spread, traffic has not changed: load is summed over more
    and more sub-windows, and shares are solved from the sum each time that it has doubled. When the
    installed shares are worse by `drift_threshold`, traffic has changed: the sum is discarded, and
    shares are solved from the latest sub-window.

    It uses integers and no clock: all ranks come to the same result from the same loads.

    Args:
        shape: numbers of layers, experts, slots and ranks.
        drift_threshold: imbalance in parts per 65536, mean over layers, that a change has to cost.
        planned: number of sub-windows from which a plan solves shares.
    """

    def __init__(self, shape: ExpertShape, drift_threshold: int, planned: int) -> None:
        self._shape = shape
        self._threshold = drift_threshold * shape.layers
        self._previous_load: Load | None = None
        self._fresh_share_errors: deque[int] = deque(maxlen=REMEMBERED_SUB_WINDOWS)
        self._summed_load: Load = np.zeros((shape.layers, shape.experts), dtype=np.int64)
        self._sub_windows_summed = 0
        self._sub_windows_solved = planned

    def new_shares(self, load: Load, layout: Layout) -> Shares | None:
        """Returns new shares, or None to keep those of `layout`; called once per sub-window.

        Args:
            load: (layers, experts), rows of the latest sub-window over all ranks.
            layout: the installed layout.
        """
        fresh = solve_shares(load, layout.placement, self._shape)
        best = self._share_error(load, layout, fresh)
        expected = max(best, self._error_by_chance(load, layout))
        if self._share_error(load, layout, layout.shares) - expected > self._threshold:
            self._summed_load, self._sub_windows_summed, self._sub_windows_solved = (
                load.copy(),
                1,
                1,
            )
            return fresh
        self._summed_load = self._summed_load + load
        while self._summed_load.sum(axis=1).max() >= MAX_SUMMED_ROWS:
            self._summed_load //= 2
        self._sub_windows_summed += 1
        if self._sub_windows_summed < 2 * self._sub_windows_solved:
            return None
        self._sub_windows_solved = self._sub_windows_summed
        return solve_shares(self._summed_load, layout.placement, self._shape)

    def _error_by_chance(self, load: Load, layout: Layout) -> int:
        """Returns the largest error that chance explains; remembers the error of fresh shares.

        The spread is taken from below the median, because a change of traffic spoils those above.
        """
        errors = sorted(self._fresh_share_errors) or [0]
        median = errors[len(errors) // 2]
        limit = median + DEVIATIONS * (median - errors[0])
        if self._previous_load is not None:
            shares = solve_shares(self._previous_load, layout.placement, self._shape)
            self._fresh_share_errors.append(self._share_error(load, layout, shares))
        self._previous_load = load
        return limit

    def _share_error(self, load: Load, layout: Layout, shares: Shares) -> int:
        """Returns the sum over layers of the imbalance with these shares, in parts per 65536."""
        return int(imbalance(load, replace(layout, shares=shares), self._shape).sum())
