"""vllm-ascend's balancer, as of 0.23.0.

Sources, all of vllm-project/vllm-ascend 0.23.0, below `vllm_ascend/`:
`eplb/core/policy/policy_swift_balancer.py` and `policy_default_eplb.py` (plans),
`eplb/core/eplb_utils.py` (first placement, dispatch), `eplb/core/eplb_worker.py` (what becomes of a
plan), `eplb/eplb_updator.py` (steps), `ascend_config.py` (defaults).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.placement import ExpertShape, Placement, logical_maps
from equipoise.hal.errors import PlacementError
from equipoise.report.replay.engine_model import (
    Cadence,
    EngineModel,
    Ids,
    Parts,
    SplitKind,
    WindowLoad,
)
from equipoise.report.replay.engines import eplb_policy
from equipoise.report.replay.engines.vllm import keep_slots

_Double = npt.NDArray[np.float64]
_Single = npt.NDArray[np.float32]
_Indices = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]

_LEVEL = 1.01
"""Rows of the fullest rank by the mean, below which Swift leaves a layer as it is."""
_LEAST_GAIN = 0.01
"""Part of a rank's mean rows that a swap of experts must take off the fullest rank."""
_MOST_SWAPS = 100
"""Swaps per layer."""


@dataclass(frozen=True)
class SwiftPolicy:
    """Plans as `SwiftBalanceEplb.rebalance_experts`, policy 2, with redundancy over all ranks.

    The hottest experts get the redundant slots anew; then experts of the fullest rank are swapped
    with those of others, one expert each way per pair of ranks. Sums are float32 where the engine's
    are; ties are decided as there, by the order in which CPython's sets hold small numbers. Exact
    under numpy 2: with numpy 1 the engine compares a swap in double precision.
    """

    def __call__(self, load: WindowLoad, installed: Placement, shape: ExpertShape) -> Placement:
        """The next placement, int32 (layers, slots).

        Raises:
            PlacementError: a rank holds an expert twice.
        """
        _check_ranks(installed, shape)
        rows = _expert_rows(load, installed, shape)
        before = _imbalances(rows, installed, shape)
        planned = installed.copy()
        # The mean of the first layer's ranks is the measure for all layers.
        mean = float(rows[0].sum() / shape.ranks)
        uneven = np.flatnonzero(before >= _LEVEL)
        if mean > 0 and uneven.size:
            redundancy = _spread_redundant(rows[uneven], installed[uneven], shape)
            for place, layer in enumerate(uneven):
                swaps = _LayerSwaps(redundancy, place, mean * _LEAST_GAIN)
                if swaps.run() / mean < before[layer]:
                    planned[layer] = np.array([list(held) for held in swaps.held]).ravel()
        return keep_slots(installed, planned, shape)


def _expert_rows(load: WindowLoad, installed: Placement, shape: ExpertShape) -> _Double:
    """Rows of each expert, (layers, experts), from those of its slots."""
    keys = installed + np.arange(shape.layers)[:, None] * shape.experts
    rows = np.bincount(keys.ravel(), load.slots.ravel(), shape.layers * shape.experts)
    by_expert: _Double = rows.reshape(shape.layers, shape.experts).astype(np.float64)
    return by_expert


def _imbalances(rows: _Double, placement: Placement, shape: ExpertShape) -> _Double:
    """Rows of the fullest rank by the mean, (layers,), if replicas share evenly.

    Sums are cumulative, because the engine adds one slot after the other; numpy's `sum` rounds
    otherwise.
    """
    layers = len(placement)
    replicas = logical_maps(placement, shape.experts).replica_count
    by_slot = np.take_along_axis(rows / replicas, placement.astype(np.int64), axis=1)
    fullest = by_slot.reshape(layers, shape.ranks, -1).cumsum(axis=2)[..., -1].max(axis=1)
    mean = by_slot.cumsum(axis=1)[:, -1] / shape.ranks
    idle = mean < 1e-9
    result: _Double = np.where(idle, 1.0, fullest / np.where(idle, 1.0, mean))
    return result


@dataclass(frozen=True)
class _Redundancy:
    """Layers whose redundant slots have been filled anew.

    Attributes:
        assigned: (layers, ranks, slots of a rank), the expert of each slot.
        weights: (layers, experts), rows of each replica.
        rank_rows: (layers, ranks).
        received: (layers, ranks, experts), whether a redundant slot of the rank got the expert.
        copies: (layers, ranks, ranks), experts that go from one rank to another.
    """

    assigned: _Indices
    weights: _Single
    rank_rows: _Single
    received: _Flags
    copies: _Indices


def _spread_redundant(rows: _Double, placement: Placement, shape: ExpertShape) -> _Redundancy:
    """Fills the redundant slots of each layer: hottest experts first, onto the emptiest ranks."""
    layers, ranks = len(placement), shape.ranks
    layer = np.arange(layers)
    assigned = placement.reshape(layers, ranks, -1).astype(np.int64)
    owner, free = _owners(assigned, shape)
    weights, hottest = _choose_redundant(rows, shape)
    assigned[free] = -1
    by_slot = np.where(free, 0, np.take_along_axis(weights[:, None], assigned, axis=2))
    rank_rows = by_slot.cumsum(axis=2)[..., -1]
    holds = np.zeros((layers, ranks, shape.experts), dtype=np.bool_)
    holds[(*np.nonzero(~free)[:2], assigned[~free])] = True
    received = np.zeros_like(holds)
    copies = np.zeros((layers, ranks, ranks), dtype=np.int64)
    for expert in hottest.T:
        sender = owner[layer, expert]
        allowed = free.any(axis=2) & ~holds[layer, :, expert] & (copies[layer, sender] < 1)
        allowed &= (expert >= 0)[:, None]
        rank = np.where(allowed, rank_rows, np.inf).argmin(axis=1)
        at = np.flatnonzero(allowed.any(axis=1))
        into, what = rank[at], expert[at]
        slot = shape.slots_per_rank - 1 - free[at, into, ::-1].argmax(axis=1)
        assigned[at, into, slot] = what
        free[at, into, slot] = False
        rank_rows[at, into] += weights[at, what]
        holds[at, into, what] = received[at, into, what] = True
        copies[at, sender[at], into] += 1
    result = _Redundancy(assigned, weights, rank_rows, received, copies)
    for place in np.flatnonzero(free.any(axis=(1, 2))).tolist():
        _fill_rest(result, place, rows[place], owner[place], free[place])
    return result


def _owners(assigned: _Indices, shape: ExpertShape) -> tuple[_Indices, _Flags]:
    """The rank of each expert's first slot, (layers, experts), and which slots are redundant.

    Slots are counted through all ranks' first, then all ranks' second, and so on.
    """
    layers, ranks, size = assigned.shape
    keys = assigned.swapaxes(1, 2).reshape(layers, -1)
    keys = keys + np.arange(layers)[:, None] * shape.experts
    _, first = np.unique(keys, return_index=True)
    redundant = np.ones(keys.size, dtype=np.bool_)
    redundant[first] = False
    by_rank = redundant.reshape(layers, size, ranks).swapaxes(1, 2)
    return (first % ranks).reshape(layers, shape.experts), np.ascontiguousarray(by_rank)


def _choose_redundant(rows: _Double, shape: ExpertShape) -> tuple[_Single, _Indices]:
    """Rows per replica, (layers, experts), and the experts of redundant slots, heaviest first.

    A slot goes to the expert with the most rows per replica, of equal ones to the last, which has a
    replica on fewer ranks than there are. -1 stands for a slot that no expert may have.
    """
    layers, experts = rows.shape
    layer = np.arange(layers)
    weights = rows.copy()
    extra = np.zeros((layers, experts), dtype=np.int64)
    redundant = shape.slots - experts
    for _ in range(redundant):
        allowed = extra + 1 < shape.ranks
        open_weights = np.where(allowed, weights, -1.0)
        expert = experts - 1 - open_weights[:, ::-1].argmax(axis=1)
        at = np.flatnonzero(allowed.any(axis=1))
        what = expert[at]
        replicas = extra[at, what] + 2
        weights[at, what] = weights[at, what] * replicas / (replicas + 1)
        extra[at, what] += 1
    single = weights.astype(np.float32)
    hottest = np.full((layers, redundant), -1, dtype=np.int64)
    for place in layer:
        chosen = np.repeat(np.arange(experts), extra[place])
        hottest[place, : chosen.size] = chosen[np.argsort(-single[place, chosen], kind="stable")]
    return single, hottest


def _fill_rest(
    layers: _Redundancy, place: int, rows: _Double, owner: _Indices, free: _Flags
) -> None:
    """Fills slots of a layer that the chosen experts left: hottest expert that its rank lacks."""
    assigned = layers.assigned[place]
    replicas = np.bincount(assigned[~free], minlength=rows.size)
    weights = (rows / replicas).astype(np.float32)
    for rank, slot in zip(*np.nonzero(free), strict=True):
        order = np.argsort(weights, kind="stable")[::-1]
        expert = order[~np.isin(order, assigned[rank])][0]
        assigned[rank, slot] = expert
        layers.copies[place, owner[expert], rank] += 1
        layers.received[place, rank, expert] = True
        weights[expert] *= replicas[expert] / (replicas[expert] + 1)
        replicas[expert] += 1
    layers.weights[place] = weights
    layers.rank_rows[place] = weights[assigned].cumsum(axis=1)[:, -1]


class _LayerSwaps:
    """Swaps of one layer's experts between its fullest rank and others.

    Args:
        redundancy: of several layers.
        place: of the layer in them.
        least_gain: rows that a swap must take off the fullest rank.
    """

    def __init__(self, redundancy: _Redundancy, place: int, least_gain: float) -> None:
        assigned = redundancy.assigned[place]
        # Sets, because the engine tries experts and lists the outcome in their order.
        self.held = [set(row) for row in assigned.tolist()]
        self._listed = np.array([list(held) for held in self.held])
        self._rows = redundancy.rank_rows[place].copy()
        self._weights = redundancy.weights[place]
        self._copies = redundancy.copies[place].copy()
        self._received = redundancy.received[place].copy()
        self._holds = np.zeros_like(self._received)
        np.put_along_axis(self._holds, assigned, True, axis=1)
        self._least_gain = least_gain

    def run(self) -> float:
        """Swaps until no swap gains enough. Returns the rows of the fullest rank.

        With the last of the allowed swaps, those before it, since the engine does not look again.
        """
        rows = float(self._rows.max())
        for _ in range(_MOST_SWAPS):
            order = np.argsort(self._rows, kind="stable")
            fullest = int(order[-1])
            rows = float(self._rows[fullest])
            others = order[:-1]
            idle = (self._copies[others, fullest] < 1) & (self._copies[fullest, others] < 1)
            if not self._swap(fullest, others[idle]):
                break
        return rows

    def _swap(self, fullest: int, others: _Indices) -> bool:
        """Swaps with the first of the others with which that gains enough."""
        if others.size == 0:
            return False
        mine, theirs = self._listed[fullest], self._listed[others]
        may_go = ~self._holds[others][:, mine] & ~self._received[fullest, mine]
        may_come = ~self._holds[fullest, theirs] & ~self._received[others[:, None], theirs]
        allowed = (may_go[:, :, None] & may_come[:, None, :]).reshape(len(others), -1)
        rows, weights = self._rows, self._weights
        gains, pairs = _best_swaps(
            rows[fullest], rows[others], weights[mine], weights[theirs], allowed
        )
        enough = gains >= self._least_gain
        if not enough.any():
            return False
        at = int(enough.argmax())
        go, come = np.divmod(int(pairs[at]), mine.size)
        self._exchange(fullest, int(others[at]), int(mine[go]), int(theirs[at, come]))
        return True

    def _exchange(self, fullest: int, other: int, goes: int, comes: int) -> None:
        """Swaps two experts between two ranks."""
        weights = self._weights
        self._rows[fullest] += weights[comes] - weights[goes]
        self._rows[other] += weights[goes] - weights[comes]
        for rank, leaves, enters in ((fullest, goes, comes), (other, comes, goes)):
            self.held[rank].remove(leaves)
            self.held[rank].add(enters)
            self._listed[rank] = list(self.held[rank])
            self._holds[rank, leaves] = False
            self._holds[rank, enters] = self._received[rank, enters] = True
        self._copies[fullest, other] += 1
        self._copies[other, fullest] += 1


def _best_swaps(
    fullest: np.float32, others: _Single, mine: _Single, theirs: _Single, allowed: _Flags
) -> tuple[_Double, _Indices]:
    """What the best swap with each other rank takes off the fuller of the two, and which it is.

    The engine computes the fullest rank's rows after a swap in double precision and the other's in
    single; the larger keeps its precision, and is compared with the best so far in single precision
    unless both are doubles. So of those that are the least in single precision the first wins if it
    is a single, and else the least of the doubles; doubles may win over the rows before the swap
    where they are equal in single precision.

    Args:
        fullest: rows of the fullest rank.
        others: (others,), rows of the other ranks.
        mine: (m,), rows of the replicas on the fullest rank.
        theirs: (others, n), those on the others.
        allowed: (others, m * n), which swaps may be done.

    Returns:
        Gain, (others,), -inf where nothing gains; pair, (others,), place in the m * n.
    """
    shape = allowed.shape
    before = float(fullest)
    double = before - mine.astype(np.float64)[:, None] + theirs.astype(np.float64)[:, None, :]
    single = (others[:, None] - theirs)[:, None, :] + mine[:, None]
    double, single = double.reshape(shape), single.reshape(shape)
    rounded = double.astype(np.float32)
    by_other = single > rounded
    after = np.where(allowed, np.where(by_other, single, rounded), np.inf).astype(np.float32)
    row = np.arange(shape[0])
    first = after.argmin(axis=1)
    least = after[row, first]
    exact = np.where(allowed & ~by_other, double, np.inf)
    lowest = exact.argmin(axis=1)
    take_single = by_other[row, first] & (least < fullest)
    pair = np.where(take_single, first, lowest)
    gain = np.where(take_single, fullest - least, before - exact[row, lowest])
    return np.where(gain > 0, gain, -np.inf), pair


@dataclass(frozen=True)
class DefaultPolicy:
    """Plans as `DefaultEplb.rebalance_experts`, policy 1.

    The hottest experts get redundant slots, one on each of the first ranks; then all experts are
    packed anew, heaviest first, onto the emptiest rank that does not hold them.
    """

    def __call__(self, load: WindowLoad, installed: Placement, shape: ExpertShape) -> Placement:
        """The next placement, int32 (layers, slots).

        Raises:
            PlacementError: more redundant slots than ranks, a rank holds an expert twice, or an
                expert finds no rank, which ends the engine's planner.
        """
        _check_ranks(installed, shape)
        redundant = shape.slots - shape.experts
        if redundant > shape.ranks:
            raise PlacementError(
                f"vllm-ascend's policy 1 takes at most one redundant slot per rank, "
                f"got {redundant} on {shape.ranks} ranks"
            )
        weights, order, extra = _rank_experts(_expert_rows(load, installed, shape), redundant)
        planned, repeated = _pack_experts(weights, order, extra, shape)
        # The worker's check of a plan leaves a layer as it is if a rank would hold an expert twice.
        planned[repeated] = installed[repeated]
        return keep_slots(installed, planned, shape)


def _rank_experts(rows: _Double, redundant: int) -> tuple[_Double, _Indices, _Indices]:
    """Rows per replica, experts by falling rows, and redundant slots by expert.

    The first two are (layers, experts) in the order of packing, the third by number of the expert.
    Each sorting begins with the order that the last one left, and turns ties round.
    """
    layers, experts = rows.shape
    layer = np.arange(layers)
    weights, order = rows, np.tile(np.arange(experts), (layers, 1))
    extra = np.zeros((layers, experts), dtype=np.int64)
    for turn in range(redundant + 1):
        falling = np.argsort(weights, axis=1, kind="stable")[:, ::-1]
        weights = np.take_along_axis(weights, falling, axis=1)
        order = np.take_along_axis(order, falling, axis=1)
        if turn < redundant:
            hottest = order[:, 0]
            replicas = extra[layer, hottest] + 1
            weights[:, 0] = weights[:, 0] * replicas / (replicas + 1)
            extra[layer, hottest] += 1
    return weights, order, extra


def _pack_experts(
    weights: _Double, order: _Indices, extra: _Indices, shape: ExpertShape
) -> tuple[Placement, _Flags]:
    """The expert of each slot, and which layers have an expert twice on a rank."""
    layers, ranks, size = len(order), shape.ranks, shape.slots_per_rank
    layer = np.arange(layers)
    by_expert = np.empty_like(weights)
    np.put_along_axis(by_expert, order, weights, axis=1)
    planned = np.empty((layers, ranks, size), dtype=np.int32)
    filled = np.zeros((layers, ranks), dtype=np.int64)
    rank_rows = np.zeros((layers, ranks))
    holds = np.zeros((layers, ranks, shape.experts), dtype=np.bool_)
    by_layer = np.repeat(np.tile(np.arange(shape.experts), layers), extra.ravel())
    copies = by_layer.reshape(layers, -1)
    first = np.arange(copies.shape[1])
    planned[:, first, 0] = copies
    filled[:, first] = 1
    rank_rows[:, first] = np.take_along_axis(by_expert, copies, axis=1)
    holds[layer[:, None], first, copies] = True
    repeated = np.zeros(layers, dtype=np.bool_)
    for expert, weight in zip(order.T, weights.T, strict=True):
        allowed = (filled < size) & ~holds[layer, :, expert]
        # With no rank allowed the engine takes the last one, even if that holds the expert.
        none = ~allowed.any(axis=1)
        rank = np.where(allowed, rank_rows, np.inf).argmin(axis=1)
        rank[none] = ranks - 1
        lost = none & (filled[:, -1] == size)
        if lost.any():
            at = int(lost.argmax())
            raise PlacementError(
                f"vllm-ascend's policy 1 fails: it finds no rank for expert {int(expert[at])} of "
                f"layer {at}: take policy 2, or other numbers of slots"
            )
        repeated |= none
        planned[layer, rank, filled[layer, rank]] = expert
        filled[layer, rank] += 1
        rank_rows[layer, rank] += weight
        holds[layer, rank, expert] = True
    return planned.reshape(layers, -1), repeated


def _check_ranks(installed: Placement, shape: ExpertShape) -> None:
    """Raises `PlacementError` if a rank holds an expert twice.

    The engine's map has one slot for each expert and rank.
    """
    held = np.sort(installed.reshape(shape.layers, shape.ranks, -1), axis=2)
    twice = (np.diff(held, axis=2) == 0).any(axis=2)
    if twice.any():
        layer, rank = (int(index[0]) for index in np.nonzero(twice))
        raise PlacementError(
            f"vllm-ascend cannot hold an expert twice on a rank, as rank {rank} of layer {layer} "
            f"does: take fewer redundant slots"
        )


@dataclass(frozen=True)
class ReplicaByRank:
    """Sends all of a rank's rows of an expert to one replica: number rank modulo replicas.

    With tensor parallelism ranks of a group begin one after the other, and at another replica for
    each expert. Replicas are in the order of slots.

    Attributes:
        tp_size: size of the engine's tensor-parallel groups.
    """

    tp_size: int = 1
    name: str = "log2phy"
    split: SplitKind = SplitKind.BY_SOURCE

    def parts(self, placement: Placement, shape: ExpertShape) -> Parts:
        """The part of the ranks whose rows go to each slot."""
        slots = self._slots(placement, shape) + np.arange(shape.layers)[:, None, None] * shape.slots
        ranks = np.bincount(slots.ravel(), minlength=shape.layers * shape.slots)
        return (ranks.reshape(shape.layers, shape.slots) / shape.ranks).astype(np.float32)

    def route(
        self,
        ids: Ids,
        sources: Ids,
        placement: Placement,
        shape: ExpertShape,
        layer: int,
        step: int,
    ) -> Ids:
        """The slots of one layer's rows; nothing is drawn, so `step` makes no difference."""
        slots = self._slots(placement[layer : layer + 1], shape)[0].astype(np.int32)
        return np.where(ids < 0, -1, slots[sources[:, None], ids]).astype(np.int32)

    def _slots(self, placement: Placement, shape: ExpertShape) -> _Indices:
        """The slot that each rank sends rows to, (layers, ranks, experts)."""
        ranks, experts = np.arange(shape.ranks)[:, None], np.arange(shape.experts)
        turns: _Indices = ranks + np.zeros_like(experts)
        if self.tp_size > 1:
            turns = ranks % self.tp_size + ranks // self.tp_size + experts
        maps = logical_maps(placement, shape.experts)
        replica = turns % maps.replica_count[:, None]
        slots: _Indices = np.take_along_axis(
            maps.logical_to_physical, replica.swapaxes(1, 2), axis=2
        ).swapaxes(1, 2)
        return slots


def initial_placement(shape: ExpertShape) -> Placement:
    """Experts in order, divided among ranks; each redundant slot of a rank has the next expert.

    Returns int32 (layers, slots). Redundant slots are given out from the last rank to the first.
    Raises `PlacementError` where that names an expert that the model does not have, or one twice
    on a rank.
    """
    held = [part.tolist() for part in np.array_split(np.arange(shape.experts), shape.ranks)]
    for number in range(shape.slots - shape.experts):
        back = number % shape.ranks + 1
        row = held[-back]
        row.append((row[-1] + 1) % shape.experts if row else back)
    placement = np.tile(np.array(held, dtype=np.int32).ravel(), (shape.layers, 1))
    if placement.max() >= shape.experts:
        raise PlacementError(
            f"vllm-ascend cannot start with {shape.experts} experts on {shape.ranks} ranks: it "
            f"would place expert {placement.max()}, which there is not"
        )
    _check_ranks(placement, shape)
    return placement


def vllm_ascend_model(layers: int) -> EngineModel:
    """Returns the model for a model of so many layers with experts."""
    return EngineModel(
        name="vllm-ascend",
        version="0.23.0",
        cadence=Cadence(
            window=600,
            # 600 and 50 for the worker, and a step for each layer.
            interval=650 + layers,
            first=600,
            layers_per_step=1,
            blocking=False,
            source="EplbConfig in vllm_ascend/ascend_config.py, EplbUpdator",
            # 50 steps for the worker; the first layer takes its weights at the end of the next.
            latency=51,
        ),
        planner=SwiftPolicy(),
        rules=(ReplicaByRank(),),
        policies={
            "default_eplb": DefaultPolicy(),
            eplb_policy.NAME: eplb_policy.plan_from_installed,
        },
        initial=initial_placement,
    )
