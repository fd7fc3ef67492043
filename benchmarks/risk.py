"""Packing by what loads have in common: the prototype of csrc/risk.cpp, measured beside it.

The load of a rank is taken to have a mean and a deviation, mean + z * deviation is its risk, and
slots trade places while that lowers the risks of the fullest ranks. Deviations come from the
covariance of sub-windows: all of it, or its first few principal directions and what is left of each
expert's variance beside them. Experts that are busy at the same time then raise each other's price
on one rank. Source of the idea: the risk term of vllm-ascend's FlashLB policy; its tree search over
replica counts is not repeated here.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
STEPS = 200
"""Trades of a layer at most."""
NORM = 16
"""The risks of ranks are weighed by this power: nearly the largest alone."""


@dataclass(frozen=True)
class Moments:
    """What sub-windows of one layer say of its experts.

    Attributes:
        mean: (experts,), rows.
        factors: (experts, directions): covariance is factors @ factors.T plus the rest.
        rest: (experts,), variance beside the factors.
    """

    mean: Floats
    factors: Floats
    rest: Floats


def moments(windows: Counts, directions: int) -> Moments:
    """From rows (sub-windows, experts) of one layer; `directions` principal ones are kept."""
    mean = windows.mean(axis=0)
    off = (windows - mean) / np.sqrt(max(windows.shape[0] - 1, 1))
    _, sizes, basis = np.linalg.svd(off, full_matrices=False)
    factors = (basis[:directions] * sizes[:directions, None]).T
    rest = np.maximum((off**2).sum(axis=0) - (factors**2).sum(axis=1), 0.0)
    return Moments(mean, factors, rest)


@dataclass
class Packing:
    """One layer's slots on their ranks; changes as slots trade places.

    Attributes:
        expert: (slots,), in each slot.
        share: (slots,), part of its expert.
        ranks: how many.
    """

    expert: npt.NDArray[np.int64]
    share: Floats
    ranks: int

    @property
    def rank(self) -> npt.NDArray[np.int64]:
        """(slots,)."""
        return np.arange(self.expert.size) // (self.expert.size // self.ranks)

    def search(self, known: Moments, z: float, movable: Mask) -> None:
        """Trade places of `movable` (slots,) while it lowers the risk."""
        for _ in range(STEPS):
            now, after = self._risks(known, z)
            after[~self._allowed(movable)] = np.inf
            best = int(after.argmin())
            if after.flat[best] >= now * (1.0 - 1e-9):
                return
            one, other = divmod(best, self.expert.size)
            for array in (self.expert, self.share):
                array[[one, other]] = array[[other, one]]

    def _allowed(self, movable: Mask) -> Mask:
        """(slots, slots): pairs on two ranks that leave no expert twice on one."""
        rank = self.rank
        on = np.zeros((self.ranks, int(self.expert.max()) + 1), dtype=np.int64)
        np.add.at(on, (rank, self.expert), 1)
        there = on[rank[:, None], self.expert[None, :]] > 0
        apart: Mask = rank[:, None] != rank[None, :]
        return apart & ~there & ~there.T & movable[:, None] & movable[None, :]

    def _risks(self, known: Moments, z: float) -> tuple[float, Floats]:
        """Now, and (slots, slots) when the two trade places: sums of powers over ranks."""
        parts = self.share[:, None] * np.column_stack([known.mean, known.factors])[self.expert]
        rest = self.share**2 * known.rest[self.expert]
        rank, size = self.rank, parts.shape[1]
        sums, spread = np.zeros((self.ranks, size)), np.zeros(self.ranks)
        np.add.at(sums, rank, parts)
        np.add.at(spread, rank, rest)
        scale = sums[:, 0].mean()

        def power(total: Floats, varies: Floats) -> Floats:
            deviation = np.sqrt((total[..., 1:] ** 2).sum(axis=-1) + np.maximum(varies, 0.0))
            risk: Floats = (total[..., 0] + z * deviation) / scale
            return risk**NORM

        each = power(sums, spread)
        swap = parts[None, :, :] - parts[:, None, :]
        varies = rest[None, :] - rest[:, None]
        here = power(sums[rank][:, None, :] + swap, spread[rank][:, None] + varies)
        whole = float(each.sum())
        after = whole - each[rank][:, None] - each[rank][None, :] + here + here.T
        return whole, after
