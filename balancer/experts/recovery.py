"""Recovers from lost ranks: the layout of the survivors, and the experts to reload."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from equipoise.balancer.experts.agreement.key_collector import BEFORE_FIRST_REBALANCE, StoredKey
from equipoise.balancer.experts.agreement.members import EPGroup
from equipoise.balancer.experts.agreement.same_on_all_ranks import check_same_on_all_ranks
from equipoise.balancer.experts.config import BalancerConfig, ShareMode
from equipoise.balancer.experts.context import (
    BalancerContext,
    InPlaceFromHost,
    StagedFromPeers,
    UpdatePathConfig,
)
from equipoise.balancer.experts.placement import ExpertShape, Layout, Placement, even_shares
from equipoise.balancer.experts.planning.topology import max_survivable
from equipoise.balancer.experts.runtime.jobs import run_blocking
from equipoise.balancer.experts.transfer.host_writes import HostWeights, write_and_verify
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import ExpertsLost, PlacementError

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlotReload:
    """A slot (numbered over the survivors) that gets an expert whose last replica was lost."""

    layer: int
    slot: int
    expert: int


@dataclass(frozen=True)
class RecoveredLayout:
    """The layout that the survivors can serve.

    Attributes:
        shape: shape of the smaller group.
        layout: the layout, with even shares until a load is known.
        reloads: slots that have to be written first.
    """

    shape: ExpertShape
    layout: Layout
    reloads: tuple[SlotReload, ...]


def surviving_config(
    config: BalancerConfig, shape: ExpertShape, before: EPGroup, after: EPGroup
) -> BalancerConfig:
    """Returns the configuration for the survivors; warns if they can survive fewer losses."""
    nodes = surviving_nodes(config.nodes, before, after)
    among = len(after.ranks) // nodes
    # Not where nodes were lost as a whole: those that are left gather as before.
    if config.shares is ShareMode.NODE and among > len(before.ranks) // config.nodes:
        LOG.warning("ranks left do not divide by node: shares node gather among %d", among)
    config = replace(config, nodes=nodes)
    ranks, planner = len(after.ranks), config.planner
    try:
        smaller = ExpertShape(shape.layers, shape.experts, ranks * shape.slots_per_rank, ranks)
    except PlacementError:
        return config  # too few slots for all experts: `surviving_layout` raises
    survive = max_survivable(smaller, config.nodes, planner.survive)
    if survive < planner.survive:
        LOG.warning("%d ranks are left: survive is %d from now on", ranks, survive)
    return replace(config, planner=replace(planner, survive=survive))


def surviving_nodes(nodes: int, before: EPGroup, after: EPGroup) -> int:
    """Returns the number of nodes among which the survivors divide evenly; 1 if they do not.

    Ranks keep their node: two survivors of one node are one node.
    """
    size = len(before.ranks) // nodes
    counts = Counter(before.ranks.index(rank) // size for rank in after.ranks)
    return len(counts) if len(set(counts.values())) == 1 else 1


def surviving_layout(
    layout: Layout, shape: ExpertShape, before: EPGroup, after: EPGroup
) -> RecoveredLayout:
    """Computes the layout of the survivors, the same on all of them.

    Raises `PlacementError` if they have too few slots.
    """
    per = shape.slots_per_rank
    survivors = [before.ranks.index(rank) for rank in after.ranks]
    smaller = ExpertShape(shape.layers, shape.experts, per * len(survivors), len(survivors))
    surviving_rows = layout.placement.reshape(shape.layers, shape.ranks, per)[:, survivors]
    placement = np.ascontiguousarray(surviving_rows.reshape(shape.layers, smaller.slots))
    reloads = tuple(
        SlotReload(layer, slot, expert)
        for layer in range(shape.layers)
        for slot, expert in _reload_row(placement[layer], shape.experts)
    )
    return RecoveredLayout(
        smaller, Layout(placement, even_shares(placement, shape.experts)), reloads
    )


def _reload_row(row: Placement, experts: int) -> list[tuple[int, int]]:
    """Gives every expert without a slot one of the expert with most slots; changes `row`."""
    copies = np.bincount(row, minlength=experts)
    reloads = []
    for expert in np.flatnonzero(copies == 0).tolist():
        fullest = int(copies.argmax())
        slot = int(np.flatnonzero(row == fullest)[-1])
        copies[fullest] -= 1
        copies[expert] += 1
        row[slot] = expert
        reloads.append((slot, expert))
    return reloads


def check_same_survivors(
    control: ControlPlane, members: EPGroup, config: BalancerConfig, layout: Layout, step: int
) -> StoredKey:
    """Checks that all survivors have the same state; returns the key that was used.

    Raises:
        RanksDiffer: they differ.
        BallotIncomplete: one of them did not take part in time.
    """
    key = f"{members.scoped_name(config.name)}/reconfigure"
    state = {"layout": layout.digest, "ranks": str(members.ranks), "step": str(step)}
    values = {f"reconfigure of balancer {config.name!r}": state}
    check_same_on_all_ranks(control, key, config.timeout, values, members.ranks)
    return StoredKey(BEFORE_FIRST_REBALANCE, key, members.ranks)


def reload_lost_experts(context: BalancerContext, recovered: RecoveredLayout) -> None:
    """Reloads this rank's part of the lost experts from host memory.

    Raises:
        ExpertsLost: there are no weights in host memory.
        SlotError: the slots hold other bytes than the source.
    """
    if not recovered.reloads:
        return
    host_weights = _host_weights(context.path)
    if host_weights is None:
        experts_by_layer: dict[int, list[int]] = {}
        for reload in recovered.reloads:
            experts_by_layer.setdefault(reload.layer, []).append(reload.expert)
        raise ExpertsLost(experts_by_layer)
    _write_reloads(context, host_weights, recovered)


def _host_weights(path: UpdatePathConfig) -> HostWeights | None:
    match path:
        case StagedFromPeers(host_weights):
            return host_weights
        case InPlaceFromHost(host_weights):
            return host_weights
    return None


def rewrite_half_written(
    context: BalancerContext, recovered: RecoveredLayout, layers: Sequence[int]
) -> None:
    """Rewrites this rank's slots of layers that were left half written. Raises `SlotError`."""
    if not isinstance(context.path, InPlaceFromHost):
        return
    per, rank = recovered.shape.slots_per_rank, context.members.rank_in_group
    for layer in layers:
        experts = recovered.layout.placement[layer, rank * per : (rank + 1) * per].tolist()
        _write_slots(
            context,
            context.path.host_weights,
            layer,
            range(layer * per, (layer + 1) * per),
            experts,
        )


def _write_reloads(
    context: BalancerContext, host_weights: HostWeights, recovered: RecoveredLayout
) -> None:
    per, rank = recovered.shape.slots_per_rank, context.members.rank_in_group
    for layer in range(recovered.shape.layers):
        own = [r for r in recovered.reloads if r.layer == layer and r.slot // per == rank]
        slots = [layer * per + reload.slot % per for reload in own]
        _write_slots(context, host_weights, layer, slots, [reload.expert for reload in own])


def _write_slots(
    context: BalancerContext,
    host_weights: HostWeights,
    layer: int,
    slots: Sequence[int],
    experts: Sequence[int],
) -> None:
    writing = write_and_verify(
        context.accelerator, context.store, host_weights, layer, slots, experts
    )
    run_blocking(writing, context.config.timeout)
