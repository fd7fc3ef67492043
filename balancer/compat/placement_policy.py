"""Which placement an engine gets, that knows no shares: an even split of every expert.

`best`, from what is installed where the caller says what that is, moves what the target needs.
Without it, for each layer, the most level of a few plans, none with two copies of an expert on a
rank. `connected` is for engines that solve shares on each batch: see
`equipoise.balancer.experts.planning.planner`.
`greedy` is the rule that DeepSeek's EPLB and TensorRT-LLM
publish, ties to the larger expert id, and may put two copies on a rank. Where there are more slots
than every expert on every rank needs, copies have to share ranks, and all three are `greedy`.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from equipoise import _native
from equipoise.balancer.compat.input_arrays import Counts
from equipoise.balancer.experts.config import parse_choice
from equipoise.balancer.experts.placement import SHARE_ONE, ExpertShape, Placement, check_placement
from equipoise.balancer.experts.planning.planner import plan
from equipoise.hal.errors import PlacementError

TARGET = 0.02
"""max/mean - 1 of the ranks that a plan which moves copies is content with."""


class EvenSplitPolicy(StrEnum):
    """How to plan."""

    BEST = "best"
    """As level as an even split gets; from what is installed, with few moves."""
    CONNECTED = "connected"
    """Copies that connect all ranks, for engines that solve shares on each batch."""
    GREEDY = "greedy"
    """The published rule."""


@dataclass(frozen=True)
class PlacementRequest:
    """What a plan is wanted for.

    Attributes:
        slots: of a layer.
        ranks: of as many slots each.
        nodes: of as many ranks each; they have to divide the ranks, and change nothing.
        policy: name of a `Rule`.
        target: max/mean - 1 of the ranks, where something is installed.
    """

    slots: int
    ranks: int
    nodes: int = 1
    policy: str = EvenSplitPolicy.BEST
    target: float = TARGET


def compute_placement(
    load: Counts, wish: PlacementRequest, installed: Placement | None = None
) -> Placement:
    """Placement, int32 (layers, slots), for (layers, experts) or (windows, layers, experts).

    Raises `PlacementError` when the numbers cannot fit together.
    """
    layers, experts = load.shape[-2:]
    shape = ExpertShape(layers, experts, wish.slots, wish.ranks)
    if wish.nodes < 1 or wish.ranks % wish.nodes:
        raise PlacementError(f"{wish.ranks} ranks do not divide among {wish.nodes} nodes")
    rule = parse_choice(EvenSplitPolicy, "policy", wish.policy)
    if installed is not None:
        check_placement(installed, shape)
    total: Counts = load.reshape(-1, layers, experts).sum(axis=0)
    if rule is EvenSplitPolicy.GREEDY or shape.slots > shape.experts * shape.ranks:
        return _aligned_to_installed(
            _native.plan_greedy(total, wish.slots, wish.ranks), wish, installed
        )
    if rule is EvenSplitPolicy.CONNECTED:
        joined = plan(total, slots=wish.slots, ranks=wish.ranks, policy="connected")
        return _aligned_to_installed(joined.placement, wish, installed)
    if installed is None:
        return _plan_anew(total, wish)
    return _plan_from_installed(total, wish, installed)


def max_rank_rows(load: Counts, placement: Placement, ranks: int) -> Counts:
    """(layers,): the fullest rank under an even split, in 1 / 65536 of a row, int64.

    In integers, so that all ranks of an engine compute the same plan.
    """
    rows = _rank_rows(load, placement, ranks)
    highest: Counts = rows.max(axis=1)
    return highest


def has_duplicates(placement: Placement, ranks: int) -> npt.NDArray[np.bool_]:
    """(layers,): whether a rank has two copies of an expert."""
    held = np.sort(placement.reshape(placement.shape[0], ranks, -1), axis=2)
    twice: npt.NDArray[np.bool_] = (held[..., 1:] == held[..., :-1]).any(axis=(1, 2))
    return twice


def _rank_rows(load: Counts, placement: Placement, ranks: int) -> Counts:
    layers, experts = load.shape
    key = np.arange(layers)[:, None] * experts + placement
    copies = np.bincount(key.ravel(), minlength=layers * experts).reshape(layers, experts)
    part = load * SHARE_ONE // np.maximum(copies, 1)
    rows = np.take_along_axis(part, placement.astype(np.int64), axis=1)
    found: Counts = rows.reshape(layers, ranks, -1).sum(axis=2)
    return found


def _aligned_to_installed(
    proposed: Placement, wish: PlacementRequest, installed: Placement | None
) -> Placement:
    """With ranks and slots named so that little moves."""
    if installed is None:
        return proposed
    return _native.align(np.ascontiguousarray(installed), proposed, wish.ranks)


def _plan_anew(load: Counts, wish: PlacementRequest) -> Placement:
    """The most level, layer by layer."""
    best = _plan_evenly(load, wish, EvenSplitPolicy.CONNECTED, None)
    for start in (best, _native.plan_greedy(load, wish.slots, wish.ranks)):
        for other in (start, _plan_evenly(load, wish, "incremental", start)):
            lower = max_rank_rows(load, other, wish.ranks) < max_rank_rows(load, best, wish.ranks)
            better = lower & ~has_duplicates(other, wish.ranks)
            best = np.where(better[:, None], other, best)
    return best


def _plan_from_installed(load: Counts, wish: PlacementRequest, installed: Placement) -> Placement:
    """From what is installed; anew where that ends far from what a new plan would reach."""
    moved = _plan_evenly(load, wish, "incremental", installed, wish.target)
    mean = load.sum(axis=1) * SHARE_ONE // wish.ranks
    margin = mean // SHARE_ONE * round(wish.target * SHARE_ONE)
    high = np.flatnonzero(max_rank_rows(load, moved, wish.ranks) > mean + margin)
    if high.size == 0:
        return moved
    fresh = _aligned_to_installed(_plan_anew(load[high], wish), wish, installed[high])
    won = max_rank_rows(load[high], moved[high], wish.ranks) - max_rank_rows(
        load[high], fresh, wish.ranks
    )
    worth = won > margin[high]
    moved[high[worth]] = fresh[worth]
    return moved


def _plan_evenly(
    load: Counts, wish: PlacementRequest, policy: str, start: Placement | None, target: float = 0.0
) -> Placement:
    return plan(
        load,
        slots=wish.slots,
        ranks=wish.ranks,
        installed=start,
        policy=policy,
        target=target,
        slack=0.0,
        split="even",
    ).placement
