"""Builds the proposal of a rebalance: new layout, routing tables and migration plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from equipoise.balancer.experts.placement import SHARE_ONE, ExpertShape, Layout
from equipoise.balancer.experts.planning.migration import (
    MigrationPlan,
    RankTransfers,
    plan_migration,
)
from equipoise.balancer.experts.planning.rebalance_plan import RebalancePlan
from equipoise.balancer.experts.routing.layer_update import LayerUpdate, layer_update


@dataclass(frozen=True)
class Proposal:
    """The outcome of planning an epoch.

    Attributes:
        plan: what it promises.
        layer_updates: what is installed together, in order; each with its tables.
        digest: equal on two ranks exactly when layout, order and tables are.
    """

    plan: RebalancePlan
    layer_updates: tuple[LayerUpdate, ...]
    digest: str

    @property
    def layout(self) -> Layout:
        """What shall be installed."""
        return self.plan.layout

    def trace_fields(self) -> dict[str, object]:
        """What it changes, and the mean imbalance over layers before and after."""
        before, after = (
            float(layers.mean()) / SHARE_ONE
            for layers in (self.plan.imbalance_before, self.plan.imbalance_predicted)
        )
        numbers: dict[str, object] = {
            "layers": len(self.plan.changed_layers),
            "lots": len(self.layer_updates),
        }
        return {**numbers, "before": round(before, 4), "predicted": round(after, 4)}


@dataclass(frozen=True)
class StagedProposal(Proposal):
    """A proposal whose weights come from peers: change k is lot k of the shipment.

    Attributes:
        migration: the same on every rank.
        transfers: what this rank does for each lot.
    """

    migration: MigrationPlan
    transfers: tuple[RankTransfers, ...]


@dataclass(frozen=True)
class TransferLimits:
    """How weights travel.

    Attributes:
        slots_per_message: slots in one blob at most.
        nodes: that the ranks divide among; sources within a node are preferred.
        staging: buffers that a rank has for lots.
        rank: this one.
    """

    slots_per_message: int
    nodes: int
    staging: int
    rank: int


def staged_proposal(
    drafted: RebalancePlan, installed: Layout, shape: ExpertShape, freight: TransferLimits
) -> StagedProposal:
    """The proposal whose weights come from the slots of peers. Raises `PlacementError`."""
    shipment = plan_migration(
        installed.placement,
        drafted.layout.placement,
        drafted.changed_layers,
        shape,
        nodes=freight.nodes,
        staging=max(freight.staging, 1),  # where there is none, nothing moves
        parcel=freight.slots_per_message,
    )
    lots = [shipment.layers(lot) for lot in range(shipment.chunks)]
    changes = _layer_updates(drafted, lots, shape)
    legs = tuple(shipment.for_rank(freight.rank, lot) for lot in range(shipment.chunks))
    return StagedProposal(drafted, changes, proposal_digest(drafted, changes), shipment, legs)


def in_place_proposal(drafted: RebalancePlan, shape: ExpertShape, size: int) -> Proposal:
    """The proposal whose weights are at hand: `size` layers are installed at a time."""
    order = drafted.changed_layers
    groups = [order[first : first + size] for first in range(0, len(order), size)]
    changes = _layer_updates(drafted, groups, shape)
    return Proposal(drafted, changes, proposal_digest(drafted, changes))


def proposal_digest(drafted: RebalancePlan, changes: Sequence[LayerUpdate]) -> str:
    """Hexadecimal digest of all that a proposal would install, in its order."""
    parts = [drafted.layout.digest, *(change.digest for change in changes)]
    return blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()


def _layer_updates(
    drafted: RebalancePlan, groups: Sequence[Sequence[int]], shape: ExpertShape
) -> tuple[LayerUpdate, ...]:
    return tuple(layer_update(drafted.layout, shape, group) for group in groups)
