"""A trial: some windows to plan on, others to measure on."""

from dataclasses import dataclass

import numpy as np

from equipoise.balancer.experts.placement import Placement
from equipoise.balancer.experts.planning.planner import plan
from equipoise.balancer.formats.arrangement import Arrangement
from equipoise.balancer.formats.statistics import Statistics
from equipoise.report.advice.chance import floor
from equipoise.report.spread import Reals, mean_known, serve, summed

MOST_WINDOWS = 64
"""To measure on: more take time and change nothing."""


@dataclass(frozen=True)
class Trial:
    """Windows of one run.

    Attributes:
        train: the first half, that is planned on.
        test: the other half, or of it as many, evenly spaced, as `MOST_WINDOWS`; the same as
            `train` where there is one window only.
    """

    train: Statistics
    test: Statistics

    @classmethod
    def of(cls, statistics: Statistics) -> "Trial":
        """One window is planned on and measured on."""
        half = statistics.windows // 2
        if not half:
            return cls(statistics, statistics)
        rest = range(half, statistics.windows)
        places = np.linspace(rest[0], rest[-1], min(len(rest), MOST_WINDOWS)).round().astype(int)
        return cls(_windows(statistics, np.arange(half)), _windows(statistics, places))

    @property
    def held_out(self) -> bool:
        """Whether other windows are measured on than planned on."""
        return self.train is not self.test

    @property
    def rows(self) -> int:
        """Of a layer in a window, the mean over those measured on; at least 1."""
        return max(1, round(float(self.test.counts.sum(axis=2).mean())))

    def planned(self, layout: Arrangement) -> float:
        """Imbalance of the rows that are planned on, summed; mean over layers."""
        return mean_known(serve("", summed(self.train), layout).by_rank.imbalance)

    def measured(self, layout: Arrangement) -> Reals:
        """(layers,): imbalance in the windows that are measured on, mean over them."""
        return serve("", self.test, layout).by_rank.imbalance

    def levelled(self, placement: Placement, ranks: int) -> Reals:
        """(layers,): the same where shares are solved anew on the rows of each window itself."""
        slots = placement.shape[1]
        found = []
        for counts in self.test.counts:
            solved = plan(counts, slots=slots, ranks=ranks, installed=placement, max_copies=0)
            found.append(np.where(counts.any(axis=1), solved.layer_imbalance, np.nan))
        return _mean_of_known(np.array(found))

    def floor(self, ranks: int, rows: int) -> float:
        """What chance alone leaves of so many rows of a layer on balanced ranks."""
        return floor(rows, ranks)


def _windows(statistics: Statistics, places: "np.typing.NDArray[np.int64]") -> Statistics:
    return Statistics(statistics.counts[places], statistics.layers)


def _mean_of_known(values: Reals) -> Reals:
    """(windows, layers) to (layers,)."""
    seen = ~np.isnan(values)
    total = np.where(seen, values, 0.0).sum(axis=0)
    count = seen.sum(axis=0)
    mean: Reals = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    return mean
