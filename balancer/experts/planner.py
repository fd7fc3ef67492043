"""What to propose, given a load: placement, shares, and what they promise."""

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
    check,
    digest,
)
from equipoise.balancer.experts.planning import plan
from equipoise.balancer.experts.shipment import Shipment, ship


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
        shipment: how its weights travel; names the layers whose placement changes.
        predicted: (layers,) imbalance in parts per 65536 under the load planned on.
        before: the same of the installed placement, with the best shares for that load.
        digest: equal on two ranks exactly when layout and shipment are.
    """

    layout: Layout
    shipment: Shipment
    predicted: npt.NDArray[np.int64]
    before: npt.NDArray[np.int64]
    digest: str

    @property
    def changed(self) -> tuple[int, ...]:
        """Layers whose placement changes, best gain first."""
        return tuple(self.shipment.order.tolist())


@dataclass(frozen=True)
class Limits:
    """What an epoch may cost.

    Attributes:
        hysteresis: parts per 65536 of imbalance that a layer must gain to be moved at all.
        staging: staging buffers of a rank: a layer that needs more stays as it is.
        parcel: slots that travel in one blob at most.
        nodes: that the ranks divide among; sources within a node are preferred.
    """

    hysteresis: int
    staging: int
    parcel: int
    nodes: int


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


def propose(load: Load, installed: Layout, shape: Shape, limits: Limits) -> Proposal:
    """Plan an epoch incrementally; every rank gets the same answer from the same load.

    Args:
        load: (layers, experts), int64, summed over ranks.
        installed: what is installed now.
        shape: how many of everything.
        limits: what it may cost.

    Raises:
        PlacementError: the planner returned a malformed placement.
    """
    before = installed.placement
    stays = plan(load, slots=shape.slots, ranks=shape.ranks, installed=before, max_copies=0)
    moves = plan(load, slots=shape.slots, ranks=shape.ranks, installed=before)
    kept = Layout(before, stays.shares)
    fresh = Layout(moves.placement, moves.shares)
    old, new = imbalance(load, kept, shape), imbalance(load, fresh, shape)
    order = _worth_it(old - new, moves.placement != before, shape, limits)
    layout = _mix(kept, fresh, order)
    check(layout.placement, shape)
    shipment = ship(
        before,
        layout.placement,
        order,
        shape,
        nodes=limits.nodes,
        staging=max(limits.staging, 1),  # where there is none, no layer is worth it
        parcel=limits.parcel,
    )
    predicted = imbalance(load, layout, shape)
    return Proposal(layout, shipment, predicted, old, f"{layout.digest} {order}")


def _worth_it(
    gain: npt.NDArray[np.int64], differs: npt.NDArray[np.bool_], shape: Shape, limits: Limits
) -> tuple[int, ...]:
    """Layers worth moving, best gain first, each of which every rank can stage whole."""
    needs = differs.reshape(shape.layers, shape.ranks, shape.slots_per_rank).sum(axis=2).max(axis=1)
    worth = (gain > limits.hysteresis) & (needs > 0) & (needs <= limits.staging)
    order = np.argsort(-gain, kind="stable")
    return tuple(order[worth[order]].tolist())


def _mix(kept: Layout, fresh: Layout, changed: tuple[int, ...]) -> Layout:
    placement, shares = kept.placement.copy(), kept.shares.copy()
    rows = list(changed)
    placement[rows] = fresh.placement[rows]
    shares[rows] = fresh.shares[rows]
    return Layout(placement, shares)
