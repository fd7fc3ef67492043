"""What to propose, given a load: placement, shares, and what they promise."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise import _native
from equipoise.balancer.experts.moves import Itinerary, itinerary
from equipoise.balancer.experts.placement import (
    SHARE_ONE,
    Load,
    Placement,
    Shape,
    Shares,
    check,
    digest,
)
from equipoise.balancer.experts.planning import plan


@dataclass(frozen=True)
class Layout:
    """A placement and its shares: what is installed, or what is proposed."""

    placement: Placement
    shares: Shares

    @property
    def digest(self) -> str:
        """Equal on two ranks exactly when the layouts are."""
        return digest(self.placement, self.shares)


@dataclass(frozen=True)
class Proposal:
    """The outcome of planning an epoch.

    Attributes:
        layout: what shall be installed.
        changed: layers whose placement changes.
        moves: how to get there.
        predicted: (layers,) imbalance in parts per 65536 under the load planned on.
    """

    layout: Layout
    changed: tuple[int, ...]
    moves: Itinerary
    predicted: npt.NDArray[np.int64]


def even_shares(placement: Placement, experts: int) -> Shares:
    """Every replica takes the same part; the remainder goes to lower slots."""
    zeros = np.zeros((placement.shape[0], experts), dtype=np.int64)
    return _native.solve_shares(zeros, placement, 1)


def solve_shares(load: Load, placement: Placement, shape: Shape) -> Shares:
    """Shares that minimise the largest rank load (water-filling)."""
    return _native.solve_shares(load, placement, shape.ranks)


def imbalance(load: Load, layout: Layout, shape: Shape) -> npt.NDArray[np.int64]:
    """(layers,): (max - mean) / mean over ranks in parts per 65536, in integers throughout."""
    rows = np.take_along_axis(load, layout.placement.astype(np.int64), axis=1)
    ranks = (rows * layout.shares).reshape(shape.layers, shape.ranks, -1).sum(axis=2)
    total = ranks.sum(axis=1)
    excess: npt.NDArray[np.int64] = ranks.max(axis=1) * shape.ranks - total
    parts: npt.NDArray[np.int64] = excess // np.maximum(total // SHARE_ONE, 1)
    return parts


def propose(load: Load, installed: Layout, shape: Shape, hysteresis: int, staging: int) -> Proposal:
    """Plan an epoch incrementally; every rank gets the same answer from the same load.

    Args:
        load: (layers, experts), int64, summed over ranks.
        installed: what is installed now.
        shape: how many of everything.
        hysteresis: parts per 65536 of imbalance that a layer must gain to be moved at all.
        staging: staging buffers of a rank; layers are taken by gain while they fit.

    Raises:
        PlacementError: the planner returned a malformed placement.
    """
    before = installed.placement
    stays = plan(load, slots=shape.slots, ranks=shape.ranks, installed=before, max_copies=0)
    moves = plan(load, slots=shape.slots, ranks=shape.ranks, installed=before)
    kept = Layout(before, stays.shares)
    fresh = Layout(moves.placement, moves.shares)
    gain = imbalance(load, kept, shape) - imbalance(load, fresh, shape)
    changed = _affordable(gain, moves.placement != before, shape, hysteresis, staging)
    layout = _mix(kept, fresh, changed)
    check(layout.placement, shape)
    return Proposal(
        layout=layout,
        changed=changed,
        moves=itinerary(before, layout.placement, shape),
        predicted=imbalance(load, layout, shape),
    )


def _affordable(
    gain: npt.NDArray[np.int64],
    differs: npt.NDArray[np.bool_],
    shape: Shape,
    hysteresis: int,
    staging: int,
) -> tuple[int, ...]:
    """Layers worth moving, best gain first, as long as every rank has staging left for them."""
    needs = differs.reshape(shape.layers, shape.ranks, shape.slots_per_rank).sum(axis=2)
    free = np.full(shape.ranks, staging)
    chosen = []
    for layer in np.argsort(-gain, kind="stable").tolist():
        worth = gain[layer] > hysteresis and needs[layer].any()
        if worth and (needs[layer] <= free).all():
            free -= needs[layer]
            chosen.append(layer)
    return tuple(sorted(chosen))


def _mix(kept: Layout, fresh: Layout, changed: tuple[int, ...]) -> Layout:
    placement, shares = kept.placement.copy(), kept.shares.copy()
    rows = list(changed)
    placement[rows] = fresh.placement[rows]
    shares[rows] = fresh.shares[rows]
    return Layout(placement, shares)
