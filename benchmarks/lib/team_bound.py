"""How level any rule can be by which sources divide their rows without telling each other anything.

Source s sees its own counts c_s and moves rows among the replicas of their experts. D_s is what the
ranks then get of it, less the mean; the cost is E |D_1 + ... + D_N|^2 over ranks. All c_s are drawn
alike and independently, so by convexity no rule is better than the best one that all sources share,
and its cost is N * (E |D|^2 + (N - 1) * |E D|^2). Since |m|^2 >= 2 t m - |t|^2 for every t,

    cost >= N * (E min |D + (N - 1) * t|^2 - N * (N - 1) * |t|^2),

where each minimum is over what one source can do with its counts, rows divided at will. So every
`lean` t gives a lower bound, on any rule: one that knows the popularity of all experts, that is
random, that differs from source to source, or that rounds. The best t is the mean deviation of the
sources that lean so: then what they do reaches the bound.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lib.share_routing import Counts, Table

Floats = npt.NDArray[np.float64]
ROUNDS, SWEEPS, FINAL_SWEEPS = 250, 4, 300
RATE = 1.28
"""Of a round, times the sources: how far the lean follows the mean deviation. All sources answer a
lean at once, so from 2 on it would swing."""
OVER = 0.75
"""Part of a difference that a pair moves, as in `hal/levelled_routing.py`."""


class DivisibleRows:
    """Divisible rows of many sources, each levelled by itself.

    Args:
        counts: (samples, experts).
        table: of the layer.
    """

    def __init__(self, counts: Counts, table: Table) -> None:
        start, homes = table.start, table.homes[table.replicas]
        runs = [range(start[e], start[e + 1]) for e in range(start.size - 1)]
        self._counts = counts.T.astype(np.float64)
        self._several = [(e, run) for e, run in enumerate(runs) if len(run) > 1]
        self._homes = homes
        # All pairs of replicas, so that no source stops before its optimum.
        self._pairs = [(a, b) for _, run in self._several for a in run for b in run if a < b]
        self._parts = np.empty((homes.size, counts.shape[0]))
        self.loads = np.zeros((table.ranks, counts.shape[0]))
        for expert, run in enumerate(runs):
            for entry in run:
                self._parts[entry] = self._counts[expert] / len(run)
                self.loads[homes[entry]] += self._parts[entry]
        self.mean = self.loads.mean(axis=0)

    @property
    def deviations(self) -> Floats:
        """(ranks, samples)."""
        above: Floats = self.loads - self.mean
        return above

    def level(self, lean: Floats, sweeps: int) -> None:
        """Towards equal loads plus `lean` (ranks,), from where they are."""
        for _ in range(sweeps):
            for a, b in self._pairs:
                home, other = self._homes[a], self._homes[b]
                move = self.loads[home] - self.loads[other] + (lean[home] - lean[other])
                move *= OVER
                np.minimum(move, self._parts[a], out=move)
                np.maximum(move, -self._parts[b], out=move)
                self._parts[a] -= move
                self._parts[b] += move
                self.loads[home] -= move
                self.loads[other] += move

    def cost_above_minimum(self, lean: Floats) -> Floats:
        """(samples,): no division has a lower |D + lean|^2 by more than this (Frank and Wolfe)."""
        heights = self.loads + lean[:, None]
        above = np.zeros(heights.shape[1])
        for expert, run in self._several:
            own = heights[self._homes[run.start : run.stop]]
            above += (own * self._parts[run.start : run.stop]).sum(axis=0)
            above -= self._counts[expert] * own.min(axis=0)
        return 2 * above


@dataclass(frozen=True)
class Bound:
    """Of N sources, in means of a rank.

    Attributes:
        least: root mean square of the deviations of ranks, below which no rule comes.
        leaned: the same of the sources that lean, rows divided.
        levelled: of sources that level their own rows, rows divided.
        leaned_imbalance: max/mean - 1 of the former.
        levelled_imbalance: of the latter.
    """

    least: float
    leaned: float
    levelled: float
    leaned_imbalance: float
    levelled_imbalance: float


def team_bound(fit: Counts, fresh: Counts, table: Table, sources: int) -> Bound:
    """The lean is found on the samples `fit`; everything is judged on others.

    Args:
        fit: (samples, experts), counts of single sources.
        fresh: the same; a multiple of `sources` samples.
        table: of the layer.
        sources: N.
    """
    others = sources - 1
    searched, lean = DivisibleRows(fit, table), np.zeros(table.ranks)
    for _ in range(ROUNDS):
        searched.level(others * lean, SWEEPS)
        lean += RATE / sources * (searched.deviations.mean(axis=1) - lean)
    judged = DivisibleRows(fresh, table)
    judged.level(np.zeros(table.ranks), FINAL_SWEEPS)
    levelled = _sums(judged, sources)
    judged.level(others * lean, FINAL_SWEEPS)
    leaned = _sums(judged, sources)
    squares = ((judged.deviations + others * lean[:, None]) ** 2).sum(axis=0)
    squares -= judged.cost_above_minimum(others * lean)
    cost = sources * (squares.mean() - sources * others * (lean**2).sum())
    mean = sources * fresh.sum() / fresh.shape[0] / table.ranks
    return Bound(
        float(np.sqrt(max(cost, 0.0) / table.ranks) / mean),
        root_mean_square(leaned),
        root_mean_square(levelled),
        float((leaned.max(axis=0) / leaned.mean(axis=0) - 1).mean()),
        float((levelled.max(axis=0) / levelled.mean(axis=0) - 1).mean()),
    )


def _sums(divided: DivisibleRows, sources: int) -> Floats:
    """(ranks, batches): loads of so many sources together."""
    loads = divided.loads
    summed: Floats = loads.reshape(loads.shape[0], -1, sources).sum(axis=2)
    return summed


def root_mean_square(loads: Floats) -> float:
    """Of deviations from the mean of (ranks, batches), in means."""
    return float(np.sqrt(((loads / loads.mean(axis=0) - 1) ** 2).mean()))
