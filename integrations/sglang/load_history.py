"""What earlier windows of load tell about the next one.

A window's load is a sample: what a plan gains on its noise is gone in the next window, and a mean
over windows has less of it. But where traffic has changed, earlier windows mislead. So each layer
decides by what predicts the second half of its window better, as parts of the load: the first half
alone, or the first half with the history.

In integers: every rank computes it for itself, and all have to get the same.
"""

import numpy as np

from equipoise.balancer.compat.input_arrays import Counts

DECAY = 7, 8
"""What a window counts for in the one after it, as a fraction: the history is worth eight windows
at most."""
FRACTION_BITS = 20
"""Of the parts of a load: differences of them, squared and summed over experts, fit into int64."""


class LoadHistory:
    """Loads of earlier windows, by layer and expert."""

    def __init__(self) -> None:
        self._loads: Counts | None = None

    def predictive(self, steps: Counts) -> Counts:
        """Return the history, zeros in layers whose traffic has changed; int64 (layers, experts).

        Args:
            steps: int64 (steps, layers, experts), a window, below 2**39 in all for an expert. With
                one step, nothing is left.
        """
        if self._loads is None or self._loads.shape != steps.shape[1:] or len(steps) < 2:
            return np.zeros(steps.shape[1:], np.int64)
        first, second = (half.sum(axis=0) for half in np.array_split(steps, 2))
        actual = _parts(second)
        with_history, alone = (
            ((_parts(load) - actual) ** 2).sum(axis=1) for load in (first + self._loads, first)
        )
        kept: Counts = np.where((with_history <= alone)[:, None], self._loads, 0)
        return kept

    def add(self, steps: Counts) -> None:
        """Add a window, and forget what does not predict it."""
        numerator, denominator = DECAY
        self._loads = (self.predictive(steps) + steps.sum(axis=0)) * numerator // denominator

    def clear(self) -> None:
        """Forget everything."""
        self._loads = None


def _parts(load: Counts) -> Counts:
    """Each expert's part of its layer's load, in units of 2**-FRACTION_BITS."""
    totals = np.maximum(load.sum(axis=1, keepdims=True), 1)
    parts: Counts = (load << FRACTION_BITS) // totals
    return parts
