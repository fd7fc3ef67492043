"""What a plan is made for: the load and how it varies, or the experts that each batch activates."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.config import Objective, PlanningPolicy, default_sigma
from equipoise.balancer.experts.placement import SHARE_ONE, Placement, Shares
from equipoise.hal.errors import PlacementError

ActiveExperts = npt.NDArray[np.bool_]
"""(batches, layers, experts): whether an expert had any rows."""
Counts = npt.NDArray[np.int64]
MAX_SWEEPS = 8
"""Rounds over all experts in which they may change their copy, at most."""


@dataclass(frozen=True)
class SingleReplicaShares:
    """Every expert's rows go to one copy.

    Attributes:
        shares: int32 (layers, slots), 65536 for the copy that runs, 0 for those that rest.
        imbalance: float64 (layers,): of the experts that run on a rank in a batch, the sum over
            batches of the largest over that of the mean, minus 1; by capacity.
    """

    shares: Shares
    imbalance: npt.NDArray[np.float64]


def assign_single_replica(
    active: ActiveExperts, placement: Placement, capacity: npt.NDArray[np.int32]
) -> SingleReplicaShares:
    """Choose the copies so that the rank which runs most experts in a batch runs few.

    A copy that gets any row of a batch has its weights read: shares that split an expert make it
    cost on every rank that holds it. So the shares are whole. What a rank runs is judged batch by
    batch: experts that run together should not run on one rank.

    Args:
        active: (batches, layers, experts).
        placement: int32 (layers, slots).
        capacity: int32 (ranks,), in 1 / 65536 of an ordinary rank.
    """
    layers = [
        _ReplicaChoice.start(active[:, layer], row, capacity) for layer, row in enumerate(placement)
    ]
    for layer in layers:
        layer.improve()
    shares = np.stack([layer.shares() for layer in layers])
    return SingleReplicaShares(shares, np.array([layer.imbalance() for layer in layers]))


@dataclass
class _ReplicaChoice:
    """One layer's choice of copies.

    Attributes:
        active: int64 (batches, experts), 0 or 1.
        slots: of each expert, one on a rank, ascending.
        weight: int64 (ranks,), what an expert adds to the height of each.
        size: slots of a rank.
        chosen: the slot that runs each expert.
        height: int64 (batches, ranks).
    """

    active: Counts
    slots: list[list[int]]
    weight: Counts
    size: int
    chosen: list[int]
    height: Counts

    @staticmethod
    def start(
        active: ActiveExperts, row: npt.NDArray[np.int32], capacity: npt.NDArray[np.int32]
    ) -> "_ReplicaChoice":
        """Most active first, each where the ranks' sums over all batches stay lowest."""
        ranks, experts = capacity.size, active.shape[1]
        size, slots = row.size // ranks, [list[int]() for _ in range(experts)]
        for slot, expert in enumerate(row.tolist()):
            if all(slot // size != other // size for other in slots[expert]):
                slots[expert].append(slot)
        weight = SHARE_ONE * SHARE_ONE // capacity.astype(np.int64)
        runs = active.astype(np.int64)
        layer = _ReplicaChoice(
            runs, slots, weight, size, [-1] * experts, np.zeros((len(runs), ranks), dtype=np.int64)
        )
        often = runs.sum(axis=0).tolist()
        for expert in sorted(range(experts), key=lambda e: (len(slots[e]) > 1, -often[e], e)):
            heights = layer.height.sum(axis=0)
            layer._move(
                expert,
                min(slots[expert], key=lambda s: int(heights[s // size] + weight[s // size])),
            )
        return layer

    def improve(self) -> None:
        """Let experts change their copy while it lowers the largest ranks of the batches."""
        several = [expert for expert, slots in enumerate(self.slots) if len(slots) > 1]
        for _ in range(MAX_SWEEPS):
            # A list, not a generator: every expert is asked, also after the first change.
            if not any([self._choose_replica(expert) for expert in several]):
                return

    def shares(self) -> Shares:
        """int32 (slots,)."""
        whole = np.zeros(self.height.shape[1] * self.size, dtype=np.int32)
        whole[self.chosen] = SHARE_ONE
        return whole

    def imbalance(self) -> float:
        """Highest rank, summed over batches, over what all ranks would have if they were level."""
        level = int(self.active.sum()) * SHARE_ONE / float((SHARE_ONE / self.weight).sum())
        return int(self.height.max(axis=1).sum()) / level - 1.0 if level else 0.0

    def _choose_replica(self, expert: int) -> bool:
        """Take the best copy of an expert, the one that it has on a tie; returns what changed."""
        before = self.chosen[expert]
        best, best_cost = before, self._cost()
        for slot in self.slots[expert]:
            self._move(expert, slot)
            cost = self._cost()
            if cost < best_cost:
                best, best_cost = slot, cost
        self._move(expert, best)
        return best != before

    def _cost(self) -> tuple[int, int]:
        """What batches wait for; then, on a tie, how uneven the sums over batches are."""
        sums = self.height.sum(axis=0) // len(self.height)
        return int(self.height.max(axis=1).sum()), int((sums * sums).sum())

    def _move(self, expert: int, slot: int) -> None:
        runs, before = self.active[:, expert], self.chosen[expert]
        if before >= 0:
            self.height[:, before // self.size] -= runs * self.weight[before // self.size]
        self.height[:, slot // self.size] += runs * self.weight[slot // self.size]
        self.chosen[expert] = slot


MAX_LAYER_ROWS = 2**46 - 1
"""Rows of a layer at most, as the native core counts them."""
DIMENSIONS = 2, 3
MAX_WINDOWS = 64
"""Windows that a covariance is taken over at most: more of them say little more, and take time."""


@dataclass(frozen=True)
class PlannerInput:
    """What is asked of the experts.

    Attributes:
        load: int64 (layers, experts), summed over windows: rows, or batches that an expert runs in.
        windows: int64 (windows, layers, experts), of which the load is the sum; None where how it
            varies is not asked for, or not known.
        sigma: standard deviations over the windows that a rank counts with.
        active: bool (batches, layers, experts), which experts run; None where rows are planned for.
    """

    load: npt.NDArray[np.int64]
    windows: npt.NDArray[np.int64] | None = None
    sigma: float = 0.0
    active: ActiveExperts | None = None


def planner_input(
    load: npt.ArrayLike, sigma: float | None, policy: PlanningPolicy, objective: Objective
) -> PlannerInput:
    """From counts (layers, experts) or (windows, layers, experts).

    Without `sigma` it is what `default_sigma` says.

    Where active experts are planned for, every window is a batch, and counts an expert once if it
    has any rows.

    Windows are kept where sigma asks for them; of more than `KEPT` neighbours are summed. Raises
    `PlacementError`.
    """
    windows, active = _windows(load), None
    if objective is Objective.ACTIVE_EXPERTS:
        if windows.shape[0] < 2:
            raise PlacementError("active_experts takes recorded routing (batches, layers, experts)")
        active = windows > 0
        windows = active.astype(np.int64)
    if sigma is None:
        sigma = default_sigma(windows.shape[0], policy, objective)
    if not 0.0 <= sigma <= 100.0:
        raise PlacementError(f"sigma must be 0 to 100, got {sigma:g}")
    count, _, experts = windows.shape
    # In floating point, which is exact up to far beyond that: integers might wrap around. Only
    # where it may be so many: the sum takes as long as planning a few layers.
    may_be_more = int(windows.max()) * count * experts > MAX_LAYER_ROWS
    if may_be_more and windows.sum(axis=(0, 2), dtype=np.float64).max() > MAX_LAYER_ROWS:
        raise PlacementError(f"a layer has more than {MAX_LAYER_ROWS} rows")
    # Of one window a copy, so that whoever called may write to it meanwhile.
    total = windows[0].copy() if count == 1 else windows.sum(axis=0)
    if sigma == 0.0 or windows.shape[0] == 1:
        return PlannerInput(total, active=active)
    starts = np.unique(np.arange(MAX_WINDOWS) * windows.shape[0] // MAX_WINDOWS)
    return PlannerInput(total, np.add.reduceat(windows, starts, axis=0), sigma, active)


def array_of(name: str, array: npt.ArrayLike) -> npt.NDArray[Any]:
    """As an array of numpy. Raises `PlacementError` for nested lists of unlike lengths."""
    try:
        return np.asarray(array)
    except (ValueError, OverflowError) as error:
        raise PlacementError(f"{name} is no array: {str(error)[:100]}") from None


def _windows(load: npt.ArrayLike) -> npt.NDArray[np.int64]:
    array = array_of("load", load)
    if array.ndim not in DIMENSIONS or 0 in array.shape:
        raise PlacementError(
            "load must be (layers, experts) or (windows, layers, experts), none of them 0, "
            f"got {array.shape}"
        )
    if array.dtype.kind not in "iu":
        raise PlacementError(f"load must be integers, got {array.dtype}")
    if array.max() > MAX_LAYER_ROWS:  # before a larger one turns negative
        raise PlacementError(f"a layer has more than {MAX_LAYER_ROWS} rows")
    windows = np.ascontiguousarray(array.reshape(-1, *array.shape[-2:]), dtype=np.int64)
    if windows.min() < 0:
        *_, layer, expert = np.unravel_index(int(array.argmin()), array.shape)
        raise PlacementError(
            f"load must not be negative: {array.min()} for expert {expert} in layer {layer}"
        )
    return windows
