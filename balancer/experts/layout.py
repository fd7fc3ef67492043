"""A placement with its shares, and what a load makes of it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise import _native
from equipoise.balancer.experts.placement import (
    SHARE_ONE,
    Load,
    Placement,
    Shape,
    Shares,
    digest,
)
from equipoise.hal.shares import SWEEPS


@dataclass(frozen=True)
class Layout:
    """A placement and its shares: what is installed, or what is proposed.

    Attributes:
        placement: int32 (layers, slots), the expert in each slot.
        shares: int32 (layers, slots).
    """

    placement: Placement
    shares: Shares

    @property
    def digest(self) -> str:
        """Equal on two ranks exactly when the layouts are."""
        return digest(self.placement, self.shares)


def even_shares(placement: Placement, experts: int) -> Shares:
    """Every replica takes the same part; the remainder goes to lower slots."""
    zeros = np.zeros((placement.shape[0], experts), dtype=np.int64)
    return _native.solve_shares(zeros, placement, 1)


def solve_shares(load: Load, placement: Placement, shape: Shape) -> Shares:
    """Shares that minimise the largest rank load (water-filling)."""
    return _native.solve_shares(load, placement, shape.ranks, SWEEPS)


def imbalance(load: Load, layout: Layout, shape: Shape) -> npt.NDArray[np.int64]:
    """(layers,): (max - mean) / mean over ranks in parts per 65536, in integers throughout."""
    rows = np.take_along_axis(load, layout.placement.astype(np.int64), axis=1)
    ranks = (rows * layout.shares).reshape(shape.layers, shape.ranks, -1).sum(axis=2)
    total = ranks.sum(axis=1)
    excess: npt.NDArray[np.int64] = ranks.max(axis=1) * shape.ranks - total
    parts: npt.NDArray[np.int64] = excess // np.maximum(total // SHARE_ONE, 1)
    return parts
