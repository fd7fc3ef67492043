"""Inputs of the planner: the load and how it varies, or which experts each batch activates."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.config import Objective, PlanningPolicy, default_sigma
from equipoise.balancer.experts.placement import SHARE_ONE, Placement, Shares
from equipoise.hal.arguments import real_number
from equipoise.hal.errors import PlacementError

ActiveExperts = npt.NDArray[np.bool_]
"""(batches, layers, experts): whether an expert had any rows."""
Counts = npt.NDArray[np.int64]
MAX_SWEEPS = 8
"""Maximum number of rounds over all experts in which each may change its replica."""


@dataclass(frozen=True)
class SingleReplicaShares:
    """Shares that send all rows of an expert to one replica.

    Attributes:
        shares: int32 (layers, slots), 65536 for the replica that runs, 0 for the others.
        imbalance: float64 (layers,). With the experts that run on a rank in a batch, relative to
            its capacity: the sum over batches of the largest rank / that of the mean - 1.
    """

    shares: Shares
    imbalance: npt.NDArray[np.float64]


def assign_single_replica(
    active: ActiveExperts, placement: Placement, capacity: npt.NDArray[np.int32]
) -> SingleReplicaShares:
    """Chooses replicas so that the rank that runs the most experts in a batch runs few.

    The weights of a replica are read if it gets any row of a batch, so an expert with split shares
    costs on every rank that holds it. Therefore each expert runs one replica. Ranks are compared
    batch by batch, because experts that run together should not run on one rank.

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
    """One layer's choice of replicas.

    Attributes:
        active: int64 (batches, experts), 0 or 1.
        slots: slots of each expert, ascending, one per rank that holds it.
        unit_load: int64 (ranks,), what an expert adds to the load of each rank.
        slots_per_rank: slots of a rank.
        chosen: the slot that runs each expert, -1 if not chosen yet.
        load: int64 (batches, ranks), active experts relative to the rank's capacity.
    """

    active: Counts
    slots: list[list[int]]
    unit_load: Counts
    slots_per_rank: int
    chosen: list[int]
    load: Counts

    @staticmethod
    def start(
        active: ActiveExperts, row: npt.NDArray[np.int32], capacity: npt.NDArray[np.int32]
    ) -> "_ReplicaChoice":
        """Places the most active experts first, each on the rank with the lowest sum so far."""
        ranks, experts = capacity.size, active.shape[1]
        slots_per_rank, slots = row.size // ranks, [list[int]() for _ in range(experts)]
        for slot, expert in enumerate(row.tolist()):
            if all(slot // slots_per_rank != other // slots_per_rank for other in slots[expert]):
                slots[expert].append(slot)
        unit_load = SHARE_ONE * SHARE_ONE // capacity.astype(np.int64)
        runs = active.astype(np.int64)
        layer = _ReplicaChoice(
            runs,
            slots,
            unit_load,
            slots_per_rank,
            [-1] * experts,
            np.zeros((len(runs), ranks), dtype=np.int64),
        )
        active_batches = runs.sum(axis=0).tolist()
        for expert in sorted(
            range(experts), key=lambda e: (len(slots[e]) > 1, -active_batches[e], e)
        ):
            rank_loads = layer.load.sum(axis=0)
            layer._move(
                expert,
                min(
                    slots[expert],
                    key=lambda s: int(
                        rank_loads[s // slots_per_rank] + unit_load[s // slots_per_rank]
                    ),
                ),
            )
        return layer

    def improve(self) -> None:
        """Changes replicas one expert at a time while that lowers the cost."""
        replicated_experts = [expert for expert, slots in enumerate(self.slots) if len(slots) > 1]
        for _ in range(MAX_SWEEPS):
            # A list, not a generator: `any` would stop at the first expert that changes.
            if not any([self._choose_replica(expert) for expert in replicated_experts]):
                return

    def shares(self) -> Shares:
        """Returns the shares, int32 (slots,)."""
        whole = np.zeros(self.load.shape[1] * self.slots_per_rank, dtype=np.int32)
        whole[self.chosen] = SHARE_ONE
        return whole

    def imbalance(self) -> float:
        """Returns the highest rank, summed over batches, / what level ranks would have, minus 1."""
        level = int(self.active.sum()) * SHARE_ONE / float((SHARE_ONE / self.unit_load).sum())
        return int(self.load.max(axis=1).sum()) / level - 1.0 if level else 0.0

    def _choose_replica(self, expert: int) -> bool:
        """Chooses an expert's best replica, on a tie the present one; returns if it changed."""
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
        """The largest rank summed over batches; to break ties, how uneven the ranks' sums are."""
        sums = self.load.sum(axis=0) // len(self.load)
        return int(self.load.max(axis=1).sum()), int((sums * sums).sum())

    def _move(self, expert: int, slot: int) -> None:
        runs, before = self.active[:, expert], self.chosen[expert]
        if before >= 0:
            self.load[:, before // self.slots_per_rank] -= (
                runs * self.unit_load[before // self.slots_per_rank]
            )
        self.load[:, slot // self.slots_per_rank] += (
            runs * self.unit_load[slot // self.slots_per_rank]
        )
        self.chosen[expert] = slot


MAX_LAYER_ROWS = 2**46 - 1
"""Maximum number of rows of a layer that the native core can count."""
DIMENSIONS = 2, 3
MAX_WINDOWS = 64
"""Maximum number of windows of a covariance; more of them add little but time."""


@dataclass(frozen=True)
class PlannerInput:
    """The load that a plan is made for.

    Attributes:
        load: int64 (layers, experts), summed over windows: rows, or batches that an expert runs in.
        windows: int64 (windows, layers, experts), whose sum is the load; None if its variation is
            not used or not known.
        sigma: standard deviations over the windows that are added to a rank's load.
        active: bool (batches, layers, experts), which experts run; None when planning for rows.
    """

    load: npt.NDArray[np.int64]
    windows: npt.NDArray[np.int64] | None = None
    sigma: float = 0.0
    active: ActiveExperts | None = None


def planner_input(
    load: npt.ArrayLike, sigma: float | None, policy: PlanningPolicy, objective: Objective
) -> PlannerInput:
    """Builds the input from counts (layers, experts) or (windows, layers, experts).

    If `sigma` is None, `default_sigma` gives it. For the objective `active_experts`, every window
    is a batch, and counts an expert once if it has any rows.

    Windows are kept if sigma is not 0; of more than `MAX_WINDOWS`, neighbours are summed. Raises
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
    sigma = real_number("sigma", sigma, PlacementError)
    if not 0.0 <= sigma <= 100.0:
        raise PlacementError(f"sigma must be 0 to 100, got {sigma:g}")
    count, _, experts = windows.shape
    # In floating point, which is exact far beyond this bound, because integers might wrap around.
    # Only if the bound may be exceeded, because the sum takes as long as planning a few layers.
    may_be_more = int(windows.max()) * count * experts > MAX_LAYER_ROWS
    if may_be_more and windows.sum(axis=(0, 2), dtype=np.float64).max() > MAX_LAYER_ROWS:
        raise PlacementError(f"a layer has more than {MAX_LAYER_ROWS} rows")
    # A single window is copied, so that the caller may write to its array meanwhile.
    total = windows[0].copy() if count == 1 else windows.sum(axis=0)
    if sigma == 0.0 or windows.shape[0] == 1:
        return PlannerInput(total, active=active)
    starts = np.unique(np.arange(MAX_WINDOWS) * windows.shape[0] // MAX_WINDOWS)
    return PlannerInput(total, np.add.reduceat(windows, starts, axis=0), sigma, active)


def array_of(name: str, array: npt.ArrayLike) -> npt.NDArray[Any]:
    """Converts to a numpy array.

    Raises `PlacementError` for nested lists of unequal lengths, and for tensors that numpy cannot
    read: on a device, or with gradients.
    """
    try:
        return np.asarray(array)
    except (ValueError, OverflowError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())[:100]
        raise PlacementError(f"{name} is not an array: {reason}") from None


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
