"""What to install, given a load, within what an epoch may cost."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.choices import Policy, Split
from equipoise.balancer.experts.config import Aims, EngineConfig
from equipoise.balancer.experts.expert_model import ranges
from equipoise.balancer.experts.group import Group, group_of
from equipoise.balancer.experts.layout import NOTHING, Layout, Retired, imbalance
from equipoise.balancer.experts.placement import Load, Placement, Shape, check
from equipoise.balancer.experts.planning import Plan, plan
from equipoise.balancer.experts.retirement import retiring
from equipoise.balancer.experts.routing_rule import RoutingRule
from equipoise.hal.errors import PlacementError

LOG = logging.getLogger(__name__)
URGENT = 1 << 62
"""The gain of a layer that would not survive what it has to; above any imbalance."""


@dataclass(frozen=True)
class Draft:
    """What a plan promises.

    Attributes:
        layout: what shall be installed.
        order: layers whose slots change, best gain first; ahead of them those of which an aborted
            epoch has left slots half written, which are filled again, and no more.
        before: (layers,) imbalance in parts per 65536 of the installed placement, with the best
            shares for the load planned on.
        predicted: the same of `layout`.
        retired: slots that are retired while their layer is under way, so that it can be.
    """

    layout: Layout
    order: tuple[int, ...]
    before: npt.NDArray[np.int64]
    predicted: npt.NDArray[np.int64]
    retired: Retired = frozenset()


@dataclass(frozen=True)
class Room:
    """What staging a rank has for lots.

    A rank with fewer buffers than slots of a layer keeps one of them apart: through it copies go to
    slots that have retired, where a layer needs more than the others. Where there are no more slots
    than experts none can ever retire, and all are for lots.

    Attributes:
        lots: buffers for them; they are the first ones.
        aside: the one that is kept apart; None where any layer fits, or nothing can move.
    """

    lots: int
    aside: int | None

    @staticmethod
    def of(staging: int, shape: Shape) -> "Room":
        """Of so many buffers."""
        if staging == 0 or staging >= shape.slots_per_rank or shape.slots == shape.experts:
            return Room(staging, None)
        return Room(staging - 1, staging - 1)


@dataclass(frozen=True)
class Limits:
    """What an epoch may cost.

    Attributes:
        hysteresis: parts per 65536 of imbalance that a layer must gain to be moved at all.
        room: a layer that needs more, and of which no more slots can retire, stays as it is.
        aims: what the plan aims at.
        nodes: that the ranks divide among.
        split: how rows are divided among copies.
    """

    hysteresis: int
    room: Room
    aims: Aims
    nodes: int
    split: Split


def limits_of(config: EngineConfig, room: Room) -> Limits:
    """As configured, for so much staging."""
    split = Split.LEVEL if config.rule is RoutingRule.SHARES else Split.EVEN
    return Limits(
        hysteresis=config.hysteresis,
        room=room,
        aims=config.aims,
        nodes=config.nodes,
        split=split,
    )


def draft(windows: Load, installed: Layout, shape: Shape, limits: Limits) -> Draft:
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
    group = group_of(shape, limits.nodes, limits.aims.survive, None)
    frail = _frail(installed.placement, group)
    kept = _kept(windows, installed, shape, limits)
    fresh = _fresh(windows, kept, frail, shape, limits)
    load: Load = windows.sum(axis=0)
    old = imbalance(load, kept, shape)
    gain = old - imbalance(load, fresh, shape)
    gain[frail] = URGENT
    worth = _worth_it(gain, installed, fresh.placement, group, limits)
    layout = _mix(kept, fresh, tuple(worth))
    check(layout.placement, shape)
    if left := _frail(layout.placement, group):
        LOG.warning("layers %s still do not survive what they have to", ranges(left))
    half = {layer for layer, _ in installed.retired} - set(worth)
    predicted, retired = imbalance(load, layout, shape), frozenset().union(*worth.values())
    return Draft(layout, (*sorted(half), *worth), old, predicted, retired)


def _frail(placement: Placement, group: Group) -> list[int]:
    """Layers that would not survive what they have to: at the start, or since ranks were lost."""
    return sorted({*group.frail(placement)[:, 0].tolist()})


def _kept(windows: Load, installed: Layout, shape: Shape, limits: Limits) -> Layout:
    """What is installed, with the best shares for this load."""
    found = _planned(windows, installed.placement, shape, limits, survive=0, max_copies=0)
    return replace(installed, shares=found.shares)


def _fresh(
    windows: Load, kept: Layout, frail: Sequence[int], shape: Shape, limits: Limits
) -> Layout:
    """The best that a few copies make of it; of frail layers, what survives, whatever it takes."""
    whole = [layer for layer in range(shape.layers) if layer not in set(frail)]
    placement, shares = kept.placement.copy(), kept.shares.copy()
    for layers, policy in _parts(whole, frail):
        before, survive = kept.placement[layers], limits.aims.survive
        try:
            found = _planned(windows[:, layers], before, shape, limits, survive, policy=policy)
        except PlacementError as error:
            if policy is Policy.INCREMENTAL:
                raise
            LOG.warning("layer %d stays as it is: %s", layers[0], error)
            continue
        placement[layers], shares[layers] = found.placement, found.shares
    return Layout(placement, shares)


def _parts(whole: list[int], frail: Sequence[int]) -> Iterator[tuple[list[int], Policy]]:
    """What is planned together; a frail layer alone, since it may be that no plan mends it."""
    if whole:
        yield whole, Policy.INCREMENTAL
    for layer in frail:
        yield [layer], Policy.CONNECTED


def _planned(
    windows: Load,
    before: Placement,
    shape: Shape,
    limits: Limits,
    survive: int,
    policy: Policy = Policy.INCREMENTAL,
    max_copies: int | None = None,
) -> Plan:
    aims = limits.aims
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
    )


def _worth_it(
    gain: npt.NDArray[np.int64],
    installed: Layout,
    proposed: Placement,
    group: Group,
    limits: Limits,
) -> dict[int, Retired]:
    """Layers worth moving, best gain first, each with what has to retire for it."""
    held, room, shape = installed.held, limits.room, group.shape
    differs = (held != proposed) & (held != NOTHING)
    needs = differs.reshape(shape.layers, shape.ranks, shape.slots_per_rank).sum(axis=2).max(axis=1)
    worth = (gain > limits.hysteresis) & (held != proposed).any(axis=1)
    found: dict[int, Retired] = {}
    for layer in np.argsort(-gain, kind="stable").tolist():
        if not worth[layer]:
            continue
        if needs[layer] <= room.lots:
            found[layer] = frozenset()
        elif room.aside is not None:
            retired = retiring(installed, proposed, layer, group, room.lots)
            found |= {} if retired is None else {layer: retired}
    return found


def _mix(kept: Layout, fresh: Layout, changed: tuple[int, ...]) -> Layout:
    placement, shares = kept.placement.copy(), kept.shares.copy()
    rows = list(changed)
    placement[rows] = fresh.placement[rows]
    shares[rows] = fresh.shares[rows]
    return Layout(placement, shares)
