"""A placement with its shares, and what a load makes of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from equipoise import _native
from equipoise.balancer.experts.aliases import aliases
from equipoise.balancer.experts.placement import (
    SHARE_ONE,
    Load,
    Placement,
    Shape,
    Shares,
    digest,
)
from equipoise.hal.routing import SWEEPS

NOTHING = -1
"""Held by a retired slot."""
Retired = frozenset[tuple[int, int]]
"""(layer, slot)."""


@dataclass(frozen=True)
class Layout:
    """A placement and its shares: what is installed, or what is proposed.

    Attributes:
        placement: int32 (layers, slots), whose tokens each slot is for.
        shares: int32 (layers, slots).
        retired: slots that no token reaches and nobody reads: they are written beside the forward,
            or an aborted epoch has left them half written. Another slot of their expert takes their
            share.
    """

    placement: Placement
    shares: Shares
    retired: Retired = frozenset()

    @property
    def digest(self) -> str:
        """Equal on two ranks exactly when the layouts are."""
        found = digest(self.placement, self.shares)
        if not self.retired:
            return found
        words = f"{found} {sorted(self.retired)}"
        return blake2b(words.encode(), digest_size=16).hexdigest()

    @property
    def held(self) -> Placement:
        """int32 (layers, slots), the expert that can be read in each slot; -1 in retired ones."""
        if not self.retired:
            return self.placement
        held = self.placement.copy()
        held[tuple(zip(*self.retired, strict=True))] = NOTHING
        return held

    def retired_in(self, layers: Sequence[int]) -> Retired:
        """Of some layers."""
        if not self.retired:
            return self.retired
        return frozenset(place for place in self.retired if place[0] in layers)

    def carried(self, shape: Shape) -> Shares:
        """Shares as tokens go: those of retired slots are with who takes their tokens."""
        if not self.retired:
            return self.shares
        shares = self.shares.copy()
        alias = aliases(self.placement, self.retired, shape)
        for layer, slot in self.retired:
            shares[layer, alias[layer, slot]] += shares[layer, slot]
            shares[layer, slot] = 0
        return shares


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
    ranks = (rows * layout.carried(shape)).reshape(shape.layers, shape.ranks, -1).sum(axis=2)
    total = ranks.sum(axis=1)
    excess: npt.NDArray[np.int64] = ranks.max(axis=1) * shape.ranks - total
    parts: npt.NDArray[np.int64] = excess // np.maximum(total // SHARE_ONE, 1)
    return parts
