"""What to propose: a draft, with its tables and the way that its weights take."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from equipoise.balancer.experts.placement import Layout, Shape
from equipoise.balancer.experts.planning.migration import Leg, Shipment, ship
from equipoise.balancer.experts.planning.rebalance_plan import Draft
from equipoise.balancer.experts.routing.layer_update import Change, change_of


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
class Freight:
    """How weights travel.

    Attributes:
        parcel: slots in one blob at most.
        nodes: that the ranks divide among; sources within a node are preferred.
        staging: buffers that a rank has for lots.
        rank: this one.
    """

    parcel: int
    nodes: int
    staging: int
    rank: int


def by_ship(drafted: Draft, installed: Layout, shape: Shape, freight: Freight) -> Shipped:
    """The proposal whose weights come from the slots of peers. Raises `PlacementError`."""
    shipment = ship(
        installed.placement,
        drafted.layout.placement,
        drafted.order,
        shape,
        nodes=freight.nodes,
        staging=max(freight.staging, 1),  # where there is none, nothing moves
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
