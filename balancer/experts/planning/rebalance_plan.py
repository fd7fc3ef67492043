"""Which layers a rebalance changes, given a load, and within what it may cost."""

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
    imbalance,
)
from equipoise.balancer.experts.planning.planner import Plan, plan
from equipoise.balancer.experts.planning.topology import RankTopology, topology
from equipoise.balancer.experts.weights.expert_weights import format_ranges
from equipoise.hal.errors import PlacementError

LOG = logging.getLogger(__name__)
URGENT = 1 << 62
"""The gain of a layer that would not survive what it has to; above any imbalance."""


@dataclass(frozen=True)
class RebalancePlan:
    """What a plan promises.

    Attributes:
        layout: what shall be installed.
        changed_layers: layers whose slots change, best gain first.
        imbalance_before: (layers,) imbalance in parts per 65536 of the installed placement, with the best
            shares for the load planned on.
        imbalance_predicted: the same of `layout`.
        short_of_staging: layers that more staging buffers would bring lower in this epoch,
            ascending.
    """

    layout: Layout
    changed_layers: tuple[int, ...]
    imbalance_before: npt.NDArray[np.int64]
    imbalance_predicted: npt.NDArray[np.int64]
    short_of_staging: tuple[int, ...] = ()


@dataclass(frozen=True)
class RebalanceLimits:
    """What an epoch may cost.

    Attributes:
        min_gain: parts per 65536 of imbalance that a layer must gain to be moved at all.
        staging: slots of a layer that a rank may fill in one epoch: its staging buffers, where
            weights pass through them. What needs more is done over several epochs.
        planner: what the plan aims at.
        nodes: that the ranks divide among.
        split: how rows are divided among copies.
    """

    min_gain: int
    staging: int
    planner: PlannerOptions
    nodes: int
    split: Split


def limits_of(config: BalancerConfig, staging: int) -> RebalanceLimits:
    """As configured, for so many staging buffers."""
    split = Split.BY_SHARES if config.rule is RoutingRule.SHARES else Split.EVEN
    return RebalanceLimits(
        min_gain=config.min_gain,
        staging=staging,
        planner=config.planner,
        nodes=config.nodes,
        split=split,
    )


def plan_rebalance(
    windows: Load, installed: Layout, shape: ExpertShape, limits: RebalanceLimits
) -> RebalancePlan:
    """Plan an epoch incrementally; every rank gets the same answer from the same load.

    Layers that would not survive what they have to, as at the start or when ranks were lost, come
    first, and are planned anew.

    Args:
        windows: (windows, layers, experts), int64, summed over ranks.
        installed: what is installed now.
        shape: how many of everything.
        limits: what it may cost.

    Raises:
        PlacementError: the planner returned a malformed placement.
    """
    group = topology(shape, limits.nodes, limits.planner.survive, None)
    frail = _under_replicated_layers(installed.placement, group)
    kept = _installed_with_new_shares(windows, installed, shape, limits)
    fresh = _replanned(windows, kept, frail, shape, limits)
    load: Load = windows.sum(axis=0)
    old = imbalance(load, kept, shape)
    gain = old - imbalance(load, fresh, shape)
    gain[frail] = URGENT
    filled = _slots_filled(installed.placement, fresh.placement, shape)
    worth = _layers_worth_moving(gain, filled, limits)
    layout = _merge_layers(kept, fresh, worth)
    check_placement(layout.placement, shape)
    if left := _under_replicated_layers(layout.placement, group):
        LOG.warning("layers %s still do not survive what they have to", format_ranges(left))
    predicted = imbalance(load, layout, shape)
    short = _short_of_staging(windows, installed, filled, predicted, shape, limits)
    return RebalancePlan(layout, tuple(worth), old, predicted, short)


def _under_replicated_layers(placement: Placement, group: RankTopology) -> list[int]:
    """Layers that would not survive what they have to: at the start, or since ranks were lost."""
    return sorted({*group.under_replicated(placement)[:, 0].tolist()})


def _installed_with_new_shares(
    windows: Load, installed: Layout, shape: ExpertShape, limits: RebalanceLimits
) -> Layout:
    """What is installed, with the best shares for this load."""
    found = _call_planner(windows, installed.placement, shape, limits, survive=0, max_copies=0)
    return replace(installed, shares=found.shares)


def _replanned(
    windows: Load, kept: Layout, frail: Sequence[int], shape: ExpertShape, limits: RebalanceLimits
) -> Layout:
    """The best that a few copies make of it; of frail layers, what survives, whatever it takes."""
    whole = [layer for layer in range(shape.layers) if layer not in set(frail)]
    placement, shares = kept.placement.copy(), kept.shares.copy()
    for layers, policy in _layers_by_policy(whole, frail):
        before, survive = kept.placement[layers], limits.planner.survive
        try:
            found = _call_planner(windows[:, layers], before, shape, limits, survive, policy=policy)
        except PlacementError as error:
            if policy is PlanningPolicy.INCREMENTAL:
                raise
            LOG.warning("layer %d stays as it is: %s", layers[0], error)
            continue
        placement[layers], shares[layers] = found.placement, found.shares
    return Layout(placement, shares)


def _layers_by_policy(
    whole: list[int], frail: Sequence[int]
) -> Iterator[tuple[list[int], PlanningPolicy]]:
    """What is planned together; a frail layer alone, since it may be that no plan mends it."""
    if whole:
        yield whole, PlanningPolicy.INCREMENTAL
    for layer in frail:
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
    aims = limits.planner
    return plan(
        windows,
        slots=shape.slots,
        ranks=shape.ranks,
        nodes=limits.nodes,
        installed=before,
        policy=policy,
        target=aims.target,
        slack=aims.slack,
        survive=survive,
        sigma=aims.sigma,
        split=limits.split,
        max_copies=max_copies,
        max_copies_per_rank=limits.staging if policy is PlanningPolicy.INCREMENTAL else None,
    )


def _slots_filled(
    installed: Placement, proposed: Placement, shape: ExpertShape
) -> npt.NDArray[np.int64]:
    """(layers,) the most slots of a layer that any rank would fill: its staging buffers."""
    differs = (installed != proposed).reshape(shape.layers, shape.ranks, shape.slots_per_rank)
    filled: npt.NDArray[np.int64] = differs.sum(axis=2).max(axis=1)
    return filled


def _short_of_staging(
    windows: Load,
    installed: Layout,
    filled: npt.NDArray[np.int64],
    predicted: npt.NDArray[np.int64],
    shape: ExpertShape,
    limits: RebalanceLimits,
) -> tuple[int, ...]:
    """Layers that a plan without the bound would bring lower, by more than is worth a move.

    Only a layer whose plan takes every staging buffer of a rank can be one, so only those are
    planned once more.
    """
    full = (filled >= limits.staging) & (predicted > limits.planner.target * SHARE_ONE)
    layers = np.flatnonzero(full)
    if limits.staging >= shape.slots_per_rank or not layers.size:
        return ()
    told, free = windows[:, layers], replace(limits, staging=shape.slots_per_rank)
    found = _call_planner(told, installed.placement[layers], shape, free, limits.planner.survive)
    reached = imbalance(
        told.sum(axis=0), Layout(found.placement, found.shares), replace(shape, layers=layers.size)
    )
    return tuple(layers[predicted[layers] - reached > limits.min_gain].tolist())


def _layers_worth_moving(
    gain: npt.NDArray[np.int64], filled: npt.NDArray[np.int64], limits: RebalanceLimits
) -> list[int]:
    """Layers worth moving, best gain first."""
    worth = (gain > limits.min_gain) & (filled > 0)
    # Incremental plans fit. One that is planned anew, so that it survives what it has to, may not.
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


def _merge_layers(kept: Layout, fresh: Layout, changed: Sequence[int]) -> Layout:
    placement, shares = kept.placement.copy(), kept.shares.copy()
    rows = list(changed)
    placement[rows] = fresh.placement[rows]
    shares[rows] = fresh.shares[rows]
    return Layout(placement, shares)
