"""The plan of our placement policy: few moves from the current placement, for an even split.

Independent of any engine. Loads are integers, so that every rank, which plans for itself, gets the
same result; only logged values are floats.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.balancer.compat.placement_policy import (
    PlacementRequest,
    compute_placement,
    max_rank_rows,
)
from equipoise.balancer.experts.placement import (
    SHARE_ONE,
    ExpertShape,
    Load,
    Placement,
    logical_maps,
)
from equipoise.balancer.experts.planning.planner import plan
from equipoise.integrations.vllm.settings import EplbPolicySettings


@dataclass(frozen=True)
class PolicyPlan:
    """A new placement, and what it changes.

    Attributes:
        placement: int64 (layers, slots), the expert in each slot.
        changed_layers: number of layers that change.
        moved_slots: number of slots that change; each takes one copy from another rank, since an
            expert that stays on its rank stays in its slot.
        balancedness_before: of the current placement under the planned load: mean / max of the
            ranks' loads, both summed over layers; None if there is no current placement.
        balancedness_after: the same for `placement`.
    """

    placement: npt.NDArray[np.int64]
    changed_layers: int
    moved_slots: int
    balancedness_before: float | None
    balancedness_after: float


def valid_placement(old: npt.NDArray[np.int64], shape: ExpertShape) -> Placement | None:
    """Return `old` (layers, slots) as int32; None if it is not a placement of that shape.

    While a group grows or shrinks, slots are empty (-1), or there are more or fewer.
    """
    if old.shape != (shape.layers, shape.slots) or old.min() < 0 or old.max() >= shape.experts:
        return None
    complete = (logical_maps(old, shape.experts).replica_count > 0).all()
    return np.ascontiguousarray(old, dtype=np.int32) if complete else None


def plan_placement(
    load: Load,
    shape: ExpertShape,
    installed: Placement | None,
    settings: EplbPolicySettings,
    history: Load | None = None,
) -> PolicyPlan:
    """Plan every layer for an even split.

    An installed layer is changed only if that lowers the load of its fullest rank by more than
    `settings.min_gain` of the mean: so no layer gets worse, and one without load stays. Where the
    load comes in steps, a plan for the first half of them also has to do so in the second half:
    what a plan gains on the load that it was made for is mostly noise where the traffic has not
    changed, and would be gone in the next window.

    Args:
        load: int64 (layers, experts) or (steps, layers, experts), none negative.
        shape: numbers of layers, experts, slots and ranks.
        installed: int32 (layers, slots), the current placement with every expert; None: there is
            none.
        settings: of `eplb_policy`.
        history: int64 (layers, experts), loads of earlier windows that count as well; None: none.

    Raises:
        PlacementError: the numbers of the shape are inconsistent.
    """
    steps = load if load.ndim == 3 else load[None]
    earlier = 0 if history is None else history
    load = steps.sum(axis=0) + earlier
    if installed is None:
        fresh = compute_placement(load, PlacementRequest(shape.slots, shape.ranks))
        after = balancedness(load, fresh, shape.ranks)
        return PolicyPlan(fresh.astype(np.int64), shape.layers, fresh.size, None, after)
    planned = _incremental_placement(load, shape, installed, settings)
    worth = _is_worthwhile(load, installed, planned, shape.ranks, settings.min_gain)
    if len(steps) > 1:
        first, second = (half.sum(axis=0) for half in np.array_split(steps, 2))
        early = _incremental_placement(first + earlier, shape, installed, settings)
        worth &= _is_worthwhile(second, installed, early, shape.ranks, settings.min_gain)
    placement = np.where(worth[:, None], planned, installed).astype(np.int64)
    differs = placement != installed
    return PolicyPlan(
        placement=placement,
        changed_layers=int(differs.any(axis=1).sum()),
        moved_slots=int(differs.sum()),
        balancedness_before=balancedness(load, installed, shape.ranks),
        balancedness_after=balancedness(load, placement.astype(np.int32), shape.ranks),
    )


def balancedness(load: Load, placement: Placement, ranks: int) -> float:
    """Return mean / max of the ranks' loads, both summed over layers, as in vLLM's log.

    1.0 if there is no load.
    """
    fullest = sum(max_rank_rows(load, placement, ranks).tolist())
    rows = sum(load.sum(axis=1).tolist())
    return rows * SHARE_ONE / ranks / fullest if fullest else 1.0


def _incremental_placement(
    load: Load, shape: ExpertShape, installed: Placement, settings: EplbPolicySettings
) -> Placement:
    return plan(
        load,
        slots=shape.slots,
        ranks=shape.ranks,
        installed=installed,
        policy="incremental",
        split="even",
        target=settings.target,
        slack=0.0,
        max_copies=int(settings.max_move_fraction * installed.size),
    ).placement


def _is_worthwhile(
    load: Load, installed: Placement, planned: Placement, ranks: int, min_gain: float
) -> npt.NDArray[np.bool_]:
    """Return (layers,), whether the change is worth it; in units of 1/65536 of a rank's mean."""
    improvement = max_rank_rows(load, installed, ranks) - max_rank_rows(load, planned, ranks)
    mean = load.sum(axis=1) // ranks
    pays: npt.NDArray[np.bool_] = improvement // np.maximum(mean, 1) > round(min_gain * SHARE_ONE)
    return pays
