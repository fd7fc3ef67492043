"""Plans placements for engines without shares, which split every expert evenly among replicas.

`best` starts from the installed placement, if the caller passes one, and changes as few slots as
the target needs; otherwise it takes, for each layer, the most even of a few plans, none of which
has two replicas of an expert on a rank. `connected` is for engines that solve shares on each batch:
see `equipoise.balancer.experts.planning.planner`. `greedy` is the rule that DeepSeek's EPLB and
TensorRT-LLM publish, ties to the larger expert id; it may put two replicas on a rank. With more
slots than one for every expert on every rank, replicas have to share ranks, and all three are
`greedy`.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from equipoise import _native
from equipoise.balancer.experts.config import parse_choice
from equipoise.balancer.experts.placement import (
    SHARE_ONE,
    ExpertShape,
    Load,
    Placement,
    check_placement,
)
from equipoise.balancer.experts.planning.planner import plan
from equipoise.hal.errors import PlacementError

TARGET = 0.02
"""max/mean - 1 over ranks at which a plan from an installed placement stops changing slots."""


class EvenSplitPolicy(StrEnum):
    """How to plan a placement with an even split."""

    BEST = "best"
    """As even as possible; from an installed placement, with few changed slots."""
    CONNECTED = "connected"
    """Replicas that connect all ranks, for engines that solve shares on each batch."""
    GREEDY = "greedy"
    """The rule that DeepSeek's EPLB and TensorRT-LLM publish."""


@dataclass(frozen=True)
class PlacementRequest:
    """Sizes and policy of a plan.

    Attributes:
        slots: slots per layer.
        ranks: number of ranks, with equally many slots each.
        nodes: has to divide the ranks; otherwise without effect.
        policy: name of an `EvenSplitPolicy`.
        target: max/mean - 1 over ranks, used if a placement is installed.
    """

    slots: int
    ranks: int
    nodes: int = 1
    policy: str = EvenSplitPolicy.BEST
    target: float = TARGET


def compute_placement(
    load: Load, request: PlacementRequest, installed: Placement | None = None
) -> Placement:
    """Plans a placement, int32 (layers, slots).

    `load` is (layers, experts) or (windows, layers, experts); windows are summed.

    Raises `PlacementError` if the sizes do not fit together.
    """
    layers, experts = load.shape[-2:]
    shape = ExpertShape(layers, experts, request.slots, request.ranks)
    if request.nodes < 1 or request.ranks % request.nodes:
        raise PlacementError(f"{request.ranks} ranks do not divide among {request.nodes} nodes")
    rule = parse_choice(EvenSplitPolicy, "policy", request.policy)
    if installed is not None:
        check_placement(installed, shape)
    total: Load = load.reshape(-1, layers, experts).sum(axis=0)
    if rule is EvenSplitPolicy.GREEDY or shape.slots > shape.experts * shape.ranks:
        return _aligned_to_installed(
            _native.plan_greedy(total, request.slots, request.ranks), request, installed
        )
    if rule is EvenSplitPolicy.CONNECTED:
        connected_plan = plan(total, slots=request.slots, ranks=request.ranks, policy="connected")
        return _aligned_to_installed(connected_plan.placement, request, installed)
    if installed is None:
        return _plan_anew(total, request)
    return _plan_from_installed(total, request, installed)


def max_rank_rows(load: Load, placement: Placement, ranks: int) -> Load:
    """Returns the load of the fullest rank with an even split, int64 (layers,), in row / 65536.

    In integers, so that all ranks of an engine compute the same plan.
    """
    rows = _rank_rows(load, placement, ranks)
    highest: Load = rows.max(axis=1)
    return highest


def has_duplicates(placement: Placement, ranks: int) -> npt.NDArray[np.bool_]:
    """Returns, bool (layers,), whether a rank has two replicas of an expert."""
    experts_by_rank = np.sort(placement.reshape(placement.shape[0], ranks, -1), axis=2)
    twice: npt.NDArray[np.bool_] = (experts_by_rank[..., 1:] == experts_by_rank[..., :-1]).any(
        axis=(1, 2)
    )
    return twice


def _rank_rows(load: Load, placement: Placement, ranks: int) -> Load:
    layers, experts = load.shape
    key = np.arange(layers)[:, None] * experts + placement
    copies = np.bincount(key.ravel(), minlength=layers * experts).reshape(layers, experts)
    part = load * SHARE_ONE // np.maximum(copies, 1)
    rows = np.take_along_axis(part, placement.astype(np.int64), axis=1)
    rank_rows: Load = rows.reshape(layers, ranks, -1).sum(axis=2)
    return rank_rows


def _aligned_to_installed(
    proposed: Placement, request: PlacementRequest, installed: Placement | None
) -> Placement:
    """Permutes ranks and slots of `proposed` so that few slots change."""
    if installed is None:
        return proposed
    return _native.align(np.ascontiguousarray(installed), proposed, request.ranks)


def _plan_anew(load: Load, request: PlacementRequest) -> Placement:
    """Returns, layer by layer, the most even of a few plans from scratch."""
    best = _plan_evenly(load, request, EvenSplitPolicy.CONNECTED, None)
    for start in (best, _native.plan_greedy(load, request.slots, request.ranks)):
        for candidate in (start, _plan_evenly(load, request, "incremental", start)):
            lower = max_rank_rows(load, candidate, request.ranks) < max_rank_rows(
                load, best, request.ranks
            )
            better = lower & ~has_duplicates(candidate, request.ranks)
            best = np.where(better[:, None], candidate, best)
    return best


def _plan_from_installed(load: Load, request: PlacementRequest, installed: Placement) -> Placement:
    """Plans from the installed placement; layers that stay far above a new plan get that one."""
    moved = _plan_evenly(load, request, "incremental", installed, request.target)
    mean = load.sum(axis=1) * SHARE_ONE // request.ranks
    margin = mean // SHARE_ONE * round(request.target * SHARE_ONE)
    high = np.flatnonzero(max_rank_rows(load, moved, request.ranks) > mean + margin)
    if high.size == 0:
        return moved
    fresh = _aligned_to_installed(_plan_anew(load[high], request), request, installed[high])
    gain = max_rank_rows(load[high], moved[high], request.ranks) - max_rank_rows(
        load[high], fresh, request.ranks
    )
    # A new plan changes most slots of a layer: it has to win more than the target's margin.
    take = gain > margin[high]
    moved[high[take]] = fresh[take]
    return moved


def _plan_evenly(
    load: Load,
    request: PlacementRequest,
    policy: str,
    start: Placement | None,
    target: float = 0.0,
) -> Placement:
    return plan(
        load,
        slots=request.slots,
        ranks=request.ranks,
        installed=start,
        policy=policy,
        target=target,
        slack=0.0,
        split="even",
    ).placement
