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
    """The result of planning a rebalance.

    Attributes:
        plan: the plan.
        layer_updates: the updates that are committed together, in order, with their tables.
        digest: equal on two ranks exactly if layout, order and tables are.
    """

    plan: RebalancePlan
    layer_updates: tuple[LayerUpdate, ...]
    digest: str

    @property
    def layout(self) -> Layout:
        """The layout to install."""
        return self.plan.layout

    def trace_fields(self) -> dict[str, object]:
        """Returns the number of layers and chunks, and the mean imbalance before and after."""
        before, after = (
            float(layers.mean()) / SHARE_ONE
            for layers in (self.plan.imbalance_before, self.plan.predicted_imbalance)
        )
        numbers: dict[str, object] = {
            "layers": len(self.plan.changed_layers),
            "chunks": len(self.layer_updates),
        }
        return {**numbers, "before": round(before, 4), "predicted": round(after, 4)}


@dataclass(frozen=True)
class StagedProposal(Proposal):
    """A proposal whose weights come from peers: update k is chunk k of the migration plan.

    Attributes:
        migration: the migration plan, the same on every rank.
        transfers: what this rank does for each chunk.
    """

    migration: MigrationPlan
    transfers: tuple[RankTransfers, ...]


@dataclass(frozen=True)
class TransferLimits:
    """Bounds of the transfer.

    Attributes:
        slots_per_message: maximum number of slots in a message.
        nodes: number of nodes; sources within a node are preferred.
        staging: staging buffers per rank.
        rank: this rank.
    """

    slots_per_message: int
    nodes: int
    staging: int
    rank: int


def staged_proposal(
    plan: RebalancePlan, installed: Layout, shape: ExpertShape, limits: TransferLimits
) -> StagedProposal:
    """Builds a proposal whose weights come from the slots of peers. Raises `PlacementError`."""
    migration = plan_migration(
        installed.placement,
        plan.layout.placement,
        plan.changed_layers,
        shape,
        nodes=limits.nodes,
        staging=max(limits.staging, 1),  # without staging the plan changes no slot
        slots_per_message=limits.slots_per_message,
    )
    chunks = [migration.layers(chunk) for chunk in range(migration.chunks)]
    updates = _layer_updates(plan, chunks, shape)
    transfers = tuple(migration.for_rank(limits.rank, chunk) for chunk in range(migration.chunks))
    return StagedProposal(plan, updates, proposal_digest(plan, updates), migration, transfers)


def in_place_proposal(plan: RebalancePlan, shape: ExpertShape, size: int) -> Proposal:
    """Builds a proposal whose weights are in host memory; each update has `size` layers."""
    order = plan.changed_layers
    groups = [order[first : first + size] for first in range(0, len(order), size)]
    updates = _layer_updates(plan, groups, shape)
    return Proposal(plan, updates, proposal_digest(plan, updates))


def proposal_digest(plan: RebalancePlan, updates: Sequence[LayerUpdate]) -> str:
    """Returns a hexadecimal digest of all that a proposal would install, in order."""
    parts = [plan.layout.digest, *(update.digest for update in updates)]
    return blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()


def _layer_updates(
    plan: RebalancePlan, groups: Sequence[Sequence[int]], shape: ExpertShape
) -> tuple[LayerUpdate, ...]:
    return tuple(layer_update(plan.layout, shape, group) for group in groups)
