"""Plans which layers a rebalance changes for a load, within limits."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.config import (
    BalancerConfig,
    PlannerOptions,
    PlanningPolicy,
    RoutingRule,
    Split,
)
from equipoise.balancer.experts.placement import (
    SHARE_ONE,
    ExpertShape,
    Layout,
    Load,
    Placement,
    check_placement,
    format_ranges,
    imbalance,
)
from equipoise.balancer.experts.planning.planner import Plan, plan
from equipoise.balancer.experts.planning.topology import RankTopology, topology
from equipoise.hal.errors import PlacementError

LOG = logging.getLogger(__name__)
URGENT = 1 << 62
"""Gain of a layer that would not survive the configured loss; above any imbalance."""


@dataclass(frozen=True)
class RebalancePlan:
    """A plan with its predicted imbalance.

    Attributes:
        layout: the layout to install.
        changed_layers: layers whose slots change, best gain first.
        imbalance_before: int64 (layers,), imbalance of the installed placement in parts per 65536,
            with the best shares for the load of the plan.
        predicted_imbalance: the same for `layout`.
        short_of_staging: layers whose imbalance more staging would lower in this rebalance,
            ascending.
    """

    layout: Layout
    changed_layers: tuple[int, ...]
    imbalance_before: npt.NDArray[np.int64]
    predicted_imbalance: npt.NDArray[np.int64]
    short_of_staging: tuple[int, ...] = ()


@dataclass(frozen=True)
class RebalanceLimits:
    """Limits of a rebalance.

    Attributes:
        min_gain: imbalance in parts per 65536 that a layer has to gain to be changed.
        staging: slots of a layer that a rank may fill in one rebalance: its staging buffers, if
            weights pass through them. A layer that needs more takes several rebalances.
        planner: options of the planner.
        nodes: number of nodes.
        split: how rows are divided among replicas.
        headroom: swaps of each changed layer that leave shares room to level single batches.
    """

    min_gain: int
    staging: int
    planner: PlannerOptions
    nodes: int
    split: Split
    headroom: int = 0


def limits_of(config: BalancerConfig, staging: int) -> RebalanceLimits:
    """Returns the limits of a configuration, with `staging` buffers."""
    split = Split.BY_SHARES if config.routing_rule is RoutingRule.SHARES else Split.EVEN
    return RebalanceLimits(
        min_gain=config.min_gain_parts,
        staging=staging,
        planner=config.planner,
        nodes=config.nodes,
        split=split,
        headroom=config.planner.headroom if config.levels_batches else 0,
    )


def plan_rebalance(
    windows: Load, installed: Layout, shape: ExpertShape, limits: RebalanceLimits
) -> RebalancePlan:
    """Plans a rebalance incrementally; all ranks get the same plan from the same load.

    Layers that would not survive the configured loss, as at the start or after ranks were lost,
    come first and are planned from scratch.

    Args:
        windows: (windows, layers, experts), int64, summed over ranks.
        installed: the installed layout.
        shape: numbers of layers, experts, slots and ranks.
        limits: limits of the rebalance.

    Raises:
        PlacementError: the planner returned a malformed placement.
    """
    rank_topology = topology(shape, limits.nodes, limits.planner.survive, None)
    under_replicated = _under_replicated_layers(installed.placement, rank_topology)
    current = _installed_with_new_shares(windows, installed, shape, limits)
    fresh = _plan_layers(windows, current, under_replicated, shape, limits)
    load: Load = windows.sum(axis=0)
    before = imbalance(load, current, shape)
    gain = before - imbalance(load, fresh, shape)
    gain[under_replicated] = URGENT
    filled = _slots_filled(installed.placement, fresh.placement, shape)
    changed_layers = _layers_worth_moving(gain, filled, limits)
    layout = _merge_layers(current, fresh, changed_layers)
    check_placement(layout.placement, shape)
    if still_at_risk := _under_replicated_layers(layout.placement, rank_topology):
        LOG.warning(
            "layers %s still do not survive the configured loss", format_ranges(still_at_risk)
        )
    predicted = imbalance(load, layout, shape)
    short = _short_of_staging(windows, installed, predicted, shape, limits)
    return RebalancePlan(layout, tuple(changed_layers), before, predicted, short)


def _under_replicated_layers(placement: Placement, rank_topology: RankTopology) -> list[int]:
    """Returns layers that would not survive the configured loss."""
    return sorted({*rank_topology.under_replicated(placement)[:, 0].tolist()})


def _installed_with_new_shares(
    windows: Load, installed: Layout, shape: ExpertShape, limits: RebalanceLimits
) -> Layout:
    """Returns the installed layout with the best shares for this load."""
    share_plan = _call_planner(windows, installed.placement, shape, limits, survive=0, max_copies=0)
    return replace(installed, shares=share_plan.shares)


def _plan_layers(
    windows: Load,
    current: Layout,
    under_replicated: Sequence[int],
    shape: ExpertShape,
    limits: RebalanceLimits,
) -> Layout:
    """Plans all layers: under-replicated ones from scratch, the others with few copies."""
    replicated = [layer for layer in range(shape.layers) if layer not in set(under_replicated)]
    placement, shares = current.placement.copy(), current.shares.copy()
    for layers, policy in _layers_by_policy(replicated, under_replicated):
        before, survive = current.placement[layers], limits.planner.survive
        try:
            layer_plan = _call_planner(
                windows[:, layers], before, shape, limits, survive, policy=policy
            )
        except PlacementError as error:
            if policy is PlanningPolicy.INCREMENTAL:
                raise
            LOG.warning("layer %d stays as it is: %s", layers[0], error)
            continue
        placement[layers], shares[layers] = layer_plan.placement, layer_plan.shares
    return Layout(placement, shares)


def _layers_by_policy(
    replicated: list[int], under_replicated: Sequence[int]
) -> Iterator[tuple[list[int], PlanningPolicy]]:
    """Yields layers that are planned together.

    Each under-replicated layer is alone: there may be no plan for one of them.
    """
    if replicated:
        yield replicated, PlanningPolicy.INCREMENTAL
    for layer in under_replicated:
        yield [layer], PlanningPolicy.CONNECTED


def _call_planner(
    windows: Load,
    before: Placement,
    shape: ExpertShape,
    limits: RebalanceLimits,
    survive: int,
    policy: PlanningPolicy = PlanningPolicy.INCREMENTAL,
    max_copies: int | None = None,
) -> Plan:
    options = limits.planner
    return plan(
        windows,
        slots=shape.slots,
        ranks=shape.ranks,
        nodes=limits.nodes,
        installed=before,
        policy=policy,
        target=options.target,
        slack=options.slack,
        survive=survive,
        sigma=options.sigma,
        split=limits.split,
        headroom=limits.headroom,
        max_copies=max_copies,
        max_copies_per_rank=limits.staging if policy is PlanningPolicy.INCREMENTAL else None,
    )


def _slots_filled(
    installed: Placement, proposed: Placement, shape: ExpertShape
) -> npt.NDArray[np.int64]:
    """Returns, (layers,), the most slots of a layer that any rank fills: the staging it needs."""
    differs = (installed != proposed).reshape(shape.layers, shape.ranks, shape.slots_per_rank)
    filled: npt.NDArray[np.int64] = differs.sum(axis=2).max(axis=1)
    return filled


def _short_of_staging(
    windows: Load,
    installed: Layout,
    predicted: npt.NDArray[np.int64],
    shape: ExpertShape,
    limits: RebalanceLimits,
) -> tuple[int, ...]:
    """Returns layers whose imbalance a plan without the staging limit lowers by `min_gain`.

    Every layer above the target is planned again. One whose plan leaves staging unused can be
    among them: where only two copies to a rank gain anything, a plan with room for one makes none.
    """
    layers = np.flatnonzero(predicted > limits.planner.target * SHARE_ONE)
    if limits.staging >= shape.slots_per_rank or not layers.size:
        return ()
    selected, free = windows[:, layers], replace(limits, staging=shape.slots_per_rank)
    unlimited_plan = _call_planner(
        selected, installed.placement[layers], shape, free, limits.planner.survive
    )
    reached = imbalance(
        selected.sum(axis=0),
        Layout(unlimited_plan.placement, unlimited_plan.shares),
        replace(shape, layers=layers.size),
    )
    return tuple(layers[predicted[layers] - reached > limits.min_gain].tolist())


def _layers_worth_moving(
    gain: npt.NDArray[np.int64], filled: npt.NDArray[np.int64], limits: RebalanceLimits
) -> list[int]:
    """Returns the layers that gain enough, best gain first."""
    worth = (gain > limits.min_gain) & (filled > 0)
    # Incremental plans fit into staging; a plan from scratch, for survival, may not.
    if beyond := np.flatnonzero(worth & (filled > limits.staging)).tolist():
        LOG.warning(
            "layers %s stay as they are: they would fill up to %d slots of a rank, which has %d "
            "staging buffers",
            format_ranges(beyond),
            filled[beyond].max(),
            limits.staging,
        )
        worth[beyond] = False
    return [layer for layer in np.argsort(-gain, kind="stable").tolist() if worth[layer]]


def _merge_layers(current: Layout, fresh: Layout, changed: Sequence[int]) -> Layout:
    placement, shares = current.placement.copy(), current.shares.copy()
    rows = list(changed)
    placement[rows] = fresh.placement[rows]
    shares[rows] = fresh.shares[rows]
    return Layout(placement, shares)
