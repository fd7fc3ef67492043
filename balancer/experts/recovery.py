"""What is left when ranks are gone, and how it is made whole again."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from equipoise.balancer.experts.agreement.key_collector import BEFORE, StoredKey
from equipoise.balancer.experts.agreement.members import EPGroup
from equipoise.balancer.experts.agreement.same_on_all_ranks import check_same_on_all_ranks
from equipoise.balancer.experts.config import BalancerConfig
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
from equipoise.hal.control import ControlPlane
from equipoise.hal.errors import ExpertsLost, PlacementError

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlotReload:
    """A slot (over all that are left) that gets an expert whose last copy was lost."""

    layer: int
    slot: int
    expert: int


@dataclass(frozen=True)
class RecoveredLayout:
    """What can be served by those who are left.

    Attributes:
        shape: of the smaller group.
        layout: with even shares, until a load has been seen.
        refills: slots that have to be written first.
    """

    shape: ExpertShape
    layout: Layout
    refills: tuple[SlotReload, ...]


def surviving_config(
    config: BalancerConfig, shape: ExpertShape, before: EPGroup, after: EPGroup
) -> BalancerConfig:
    """What those who are left can still aim at; less than was asked for is said."""
    config = replace(config, nodes=surviving_nodes(config.nodes, before, after))
    ranks, planner = len(after.ranks), config.planner
    try:
        left = ExpertShape(shape.layers, shape.experts, ranks * shape.slots_per_rank, ranks)
    except PlacementError:
        return config  # too few slots for all experts: refused in its turn
    survive = max_survivable(left, config.nodes, planner.survive)
    if survive < planner.survive:
        LOG.warning("%d ranks are left: survive is %d from now on", ranks, survive)
    return replace(config, planner=replace(planner, survive=survive))


def surviving_nodes(nodes: int, before: EPGroup, after: EPGroup) -> int:
    """Among how many nodes those who are left divide evenly; 1 where they do not.

    A rank stays on the node that it was on: two that are left of one are no two nodes.
    """
    size = len(before.ranks) // nodes
    counts = Counter(before.ranks.index(rank) // size for rank in after.ranks)
    return len(counts) if len(set(counts.values())) == 1 else 1


def surviving_layout(
    layout: Layout, shape: ExpertShape, before: EPGroup, after: EPGroup
) -> RecoveredLayout:
    """The same on every rank that is left. Raises `PlacementError`: too few slots are left."""
    per = shape.slots_per_rank
    places = [before.ranks.index(rank) for rank in after.ranks]
    smaller = ExpertShape(shape.layers, shape.experts, per * len(places), len(places))
    kept = layout.placement.reshape(shape.layers, shape.ranks, per)[:, places]
    placement = np.ascontiguousarray(kept.reshape(shape.layers, smaller.slots))
    refills = tuple(
        SlotReload(layer, slot, expert)
        for layer in range(shape.layers)
        for slot, expert in _refilled(placement[layer], shape.experts)
    )
    return RecoveredLayout(
        smaller, Layout(placement, even_shares(placement, shape.experts)), refills
    )


def _refilled(row: Placement, experts: int) -> list[tuple[int, int]]:
    """Give every expert that has no slot one of the expert that has most. Changes `row`."""
    copies = np.bincount(row, minlength=experts)
    found = []
    for expert in np.flatnonzero(copies == 0).tolist():
        fullest = int(copies.argmax())
        slot = int(np.flatnonzero(row == fullest)[-1])
        copies[fullest] -= 1
        copies[expert] += 1
        row[slot] = expert
        found.append((slot, expert))
    return found


def check_same_survivors(
    control: ControlPlane, members: EPGroup, config: BalancerConfig, layout: Layout, step: int
) -> StoredKey:
    """See that all who are left mean the same; returns what was asked to that end.

    Raises:
        AgreementLost: they do not.
        BallotIncomplete: one of them does not come.
    """
    question = f"{members.scoped_name(config.name)}/reconfigure"
    mine = {"layout": layout.digest, "ranks": str(members.ranks), "step": str(step)}
    told = {f"reconfigure of balancer {config.name!r}": mine}
    check_same_on_all_ranks(control, question, config.timeout, told, members.ranks)
    return StoredKey(BEFORE, question, members.ranks)


def reload_lost_experts(context: BalancerContext, saved: RecoveredLayout) -> None:
    """Write this rank's part of what was lost from the host's memory.

    Raises:
        ExpertsLost: it has none.
        SlotError: what was written is not what was read.
    """
    if not saved.refills:
        return
    supply = _host_weights(context.path)
    if supply is None:
        gone: dict[int, list[int]] = {}
        for lost in saved.refills:
            gone.setdefault(lost.layer, []).append(lost.expert)
        raise ExpertsLost(gone)
    _write(context, supply, saved)


def _host_weights(path: UpdatePathConfig) -> HostWeights | None:
    match path:
        case StagedFromPeers(spare):
            return spare
        case InPlaceFromHost(supply):
            return supply
    return None


def rewrite_half_written(
    context: BalancerContext, saved: RecoveredLayout, layers: Sequence[int]
) -> None:
    """Write all of this rank's slots of layers that were left half written. Raises `SlotError`."""
    if not isinstance(context.path, InPlaceFromHost):
        return
    per, place = saved.shape.slots_per_rank, context.members.rank_in_group
    for layer in layers:
        experts = saved.layout.placement[layer, place * per : (place + 1) * per].tolist()
        _fill(context, context.path.supply, layer, range(layer * per, (layer + 1) * per), experts)


def _write(context: BalancerContext, supply: HostWeights, saved: RecoveredLayout) -> None:
    per, place = saved.shape.slots_per_rank, context.members.rank_in_group
    for layer in range(saved.shape.layers):
        mine = [r for r in saved.refills if r.layer == layer and r.slot // per == place]
        slots = [layer * per + refilled.slot % per for refilled in mine]
        _fill(context, supply, layer, slots, [refilled.expert for refilled in mine])


def _fill(
    context: BalancerContext,
    supply: HostWeights,
    layer: int,
    slots: Sequence[int],
    experts: Sequence[int],
) -> None:
    writing = write_and_verify(context.accelerator, context.store, supply, layer, slots, experts)
    run_blocking(writing, context.config.timeout)
