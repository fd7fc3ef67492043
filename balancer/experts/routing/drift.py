"""When shares are worth solving again, and from which loads."""

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
"""Sub-windows whose lessons are kept; their median outvotes the two that a switch spoils."""
MOST_ROWS = 2**45
"""Of a layer, that are summed; beyond, every count is halved. The solver takes less than 2**46."""
DEVIATIONS = 2
"""How far above the median chance is believed to reach, in distances of the least below it."""


class DriftDetector:
    """Tells a change of traffic from the noise of a sub-window.

    Shares that are solved from a sub-window always look better on that same sub-window: they fit
    its noise. So what they are worth is learnt on the sub-window that comes next: shares solved
    from the one before, on the one at hand. While the installed ones do as well as such fresh ones
    do, give or take their spread, nothing has changed: then sums grow, and shares are solved from
    them each time that they rest on twice as many sub-windows. When the installed ones do worse by
    the hysteresis, traffic has changed: what was summed is forgotten, and shares are solved from
    the latest.

    Integers throughout, and no clock: every rank that is given the same loads says the same.

    Args:
        shape: how many of everything.
        hysteresis: imbalance in parts per 65536, mean over layers, that a change has to cost.
        planned: sub-windows that the shares of a plan rest on.
    """

    def __init__(self, shape: ExpertShape, hysteresis: int, planned: int) -> None:
        self._shape = shape
        self._threshold = hysteresis * shape.layers
        self._previous_load: Load | None = None
        self._fresh_share_errors: deque[int] = deque(maxlen=REMEMBERED_SUB_WINDOWS)
        self._summed_load: Load = np.zeros((shape.layers, shape.experts), dtype=np.int64)
        self._sub_windows_summed = 0
        self._sub_windows_solved = planned

    def new_shares(self, load: Load, layout: Layout) -> Shares | None:
        """Shares to install in place of those of `layout`, or None; called once a sub-window.

        Args:
            load: (layers, experts), rows of the latest sub-window over all ranks.
            layout: what is installed.
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
        while self._summed_load.sum(axis=1).max() >= MOST_ROWS:
            self._summed_load //= 2
        self._sub_windows_summed += 1
        if self._sub_windows_summed < 2 * self._sub_windows_solved:
            return None
        self._sub_windows_solved = self._sub_windows_summed
        return solve_shares(self._summed_load, layout.placement, self._shape)

    def _error_by_chance(self, load: Load, layout: Layout) -> int:
        """The most that chance explains: what fresh shares miss on a sub-window unseen; learns.

        From below the median, because what a switch spoils lies above it.
        """
        lessons = sorted(self._fresh_share_errors) or [0]
        usual = lessons[len(lessons) // 2]
        usual += DEVIATIONS * (usual - lessons[0])
        if self._previous_load is not None:
            shares = solve_shares(self._previous_load, layout.placement, self._shape)
            self._fresh_share_errors.append(self._share_error(load, layout, shares))
        self._previous_load = load
        return usual

    def _share_error(self, load: Load, layout: Layout, shares: Shares) -> int:
        """Sum over layers of the imbalance with these shares, in parts per 65536."""
        return int(imbalance(load, replace(layout, shares=shares), self._shape).sum())
