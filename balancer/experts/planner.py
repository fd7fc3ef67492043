"""What to propose, given a load: placement, shares, how to get there, and what it promises."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.change import Change, change_of
from equipoise.balancer.experts.choices import Split
from equipoise.balancer.experts.config import Aims, EngineConfig
from equipoise.balancer.experts.layout import Layout, imbalance
from equipoise.balancer.experts.placement import Load, Placement, Shape, check
from equipoise.balancer.experts.planning import Plan, plan
from equipoise.balancer.experts.routing_rule import RoutingRule
from equipoise.balancer.experts.shipment import Leg, Shipment, ship


@dataclass(frozen=True)
class Draft:
    """What a plan promises.

    Attributes:
        layout: what shall be installed.
        order: layers whose placement changes, best gain first.
        before: (layers,) imbalance in parts per 65536 of the installed placement, with the best
            shares for the load planned on.
        predicted: the same of `layout`.
    """

    layout: Layout
    order: tuple[int, ...]
    before: npt.NDArray[np.int64]
    predicted: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Proposal:
    """The outcome of planning an epoch.

    Attributes:
        draft: what it promises.
        changes: what is installed together, in order; each with its tables.
        digest: equal on two ranks exactly when layout, order and tables are.
    """

    draft: Draft
    changes: tuple[Change, ...]
    digest: str

    @property
    def layout(self) -> Layout:
        """What shall be installed."""
        return self.draft.layout


@dataclass(frozen=True)
class Shipped(Proposal):
    """A proposal whose weights come from peers: change k is lot k of the shipment.

    Attributes:
        shipment: the same on every rank.
        legs: what this rank does for each lot.
    """

    shipment: Shipment
    legs: tuple[Leg, ...]


@dataclass(frozen=True)
class Limits:
    """What an epoch may cost.

    Attributes:
        hysteresis: parts per 65536 of imbalance that a layer must gain to be moved at all.
        staging: staging buffers of a rank: a layer that needs more stays as it is.
        aims: what the plan aims at.
        nodes: that the ranks divide among.
        split: how rows are divided among copies.
    """

    hysteresis: int
    staging: int
    aims: Aims
    nodes: int
    split: Split


@dataclass(frozen=True)
class Freight:
    """How weights travel.

    Attributes:
        parcel: slots in one blob at most.
        nodes: that the ranks divide among; sources within a node are preferred.
        staging: staging buffers of a rank.
        rank: this one.
    """

    parcel: int
    nodes: int
    staging: int
    rank: int


def limits_of(config: EngineConfig, staging: int) -> Limits:
    """As configured, for so many staging buffers."""
    split = Split.LEVEL if config.rule is RoutingRule.SHARES else Split.EVEN
    return Limits(
        hysteresis=config.hysteresis,
        staging=staging,
        aims=config.aims,
        nodes=config.nodes,
        split=split,
    )


def draft(windows: Load, installed: Layout, shape: Shape, limits: Limits) -> Draft:
    """Plan an epoch incrementally; every rank gets the same answer from the same load.

    Args:
        windows: (windows, layers, experts), int64, summed over ranks.
        installed: what is installed now.
        shape: how many of everything.
        limits: what it may cost.

    Raises:
        PlacementError: the planner returned a malformed placement.
    """
    before = installed.placement
    stays = _planned(windows, before, shape, limits, max_copies=0)
    moves = _planned(windows, before, shape, limits, max_copies=None)
    kept = Layout(before, stays.shares)
    fresh = Layout(moves.placement, moves.shares)
    load: Load = windows.sum(axis=0)
    old, new = imbalance(load, kept, shape), imbalance(load, fresh, shape)
    order = _worth_it(old - new, moves.placement != before, shape, limits)
    layout = _mix(kept, fresh, order)
    check(layout.placement, shape)
    return Draft(layout, order, old, imbalance(load, layout, shape))


def _planned(
    windows: Load, before: Placement, shape: Shape, limits: Limits, max_copies: int | None
) -> Plan:
    aims = limits.aims
    return plan(
        windows,
        slots=shape.slots,
        ranks=shape.ranks,
        nodes=limits.nodes,
        installed=before,
        target=aims.target,
        slack=aims.slack,
        survive=aims.survive,
        sigma=aims.sigma,
        split=limits.split,
        max_copies=max_copies,
    )


def by_ship(drafted: Draft, installed: Layout, shape: Shape, freight: Freight) -> Shipped:
    """The proposal whose weights come from the slots of peers. Raises `PlacementError`."""
    shipment = ship(
        installed.placement,
        drafted.layout.placement,
        drafted.order,
        shape,
        nodes=freight.nodes,
        staging=max(freight.staging, 1),  # where there is none, no layer is worth it
        parcel=freight.parcel,
    )
    lots = [shipment.layers(lot) for lot in range(shipment.lots)]
    changes = _changes(drafted, lots, shape)
    legs = tuple(shipment.leg(freight.rank, lot) for lot in range(shipment.lots))
    return Shipped(drafted, changes, digest_of(drafted, changes), shipment, legs)


def by_groups(drafted: Draft, shape: Shape, size: int) -> Proposal:
    """The proposal whose weights are at hand: `size` layers are installed at a time."""
    order = drafted.order
    groups = [order[first : first + size] for first in range(0, len(order), size)]
    changes = _changes(drafted, groups, shape)
    return Proposal(drafted, changes, digest_of(drafted, changes))


def digest_of(drafted: Draft, changes: Sequence[Change]) -> str:
    """Hexadecimal digest of all that a proposal would install, in its order."""
    parts = [drafted.layout.digest, *(change.digest for change in changes)]
    return blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()


def _changes(drafted: Draft, groups: Sequence[Sequence[int]], shape: Shape) -> tuple[Change, ...]:
    return tuple(change_of(drafted.layout, shape, group) for group in groups)


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
