"""vLLM's balancer, as of 0.33.0.

Sources, all of vllm-project/vllm 0.33.0: `vllm/distributed/eplb/policy/default.py` (plans),
`vllm/model_executor/layers/fused_moe/router/base_router.py` (dispatch),
`vllm/distributed/eplb/eplb_state.py` and `async_worker.py` (window, steps, first placement),
`vllm/config/parallel.py` (defaults).
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from equipoise import _native
from equipoise.balancer.experts.placement import (
    ABSENT,
    ExpertShape,
    Placement,
    even_shares,
)
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

_Weights = npt.NDArray[np.floating]
_Indices = npt.NDArray[np.int64]

_MAX_REDUNDANT = 1023
"""Redundant slots of a layer for which vLLM's maps have room."""


@dataclass(frozen=True)
class DefaultPolicy:
    """Plans as `DefaultEplbPolicy.rebalance_experts`, with all of its post-processing.

    Groups of experts are packed onto nodes, experts get their replicas within their node, and
    replicas are packed onto the node's ranks; an expert that stays on its rank keeps its slot.
    Loads are float32, and float64 once they are divided among replicas. Equal loads are ordered as
    numpy's default sort leaves them, there and here, which is not stable and depends on numpy's
    version and on the processor.

    Attributes:
        groups: groups of experts per layer that the model has (`num_expert_groups`).
        nodes: nodes that the ranks are on.
    """

    groups: int = 1
    nodes: int = 1

    def __call__(self, load: WindowLoad, installed: Placement, shape: ExpertShape) -> Placement:
        """The next placement, int32 (layers, slots).

        Raises:
            PlacementError: the groups do not divide the experts.
        """
        groups, nodes = self._divisions(shape)
        weight = load.experts.astype(np.float32)
        planned = _plan_hierarchical(weight, shape, groups, nodes)
        return keep_slots(installed, planned.astype(np.int32), shape)

    def _divisions(self, shape: ExpertShape) -> tuple[int, int]:
        """Groups and nodes that vLLM plans with: one each where they do not divide."""
        nodes = self.nodes if shape.ranks % self.nodes == 0 else 1
        groups, nodes = (self.groups, nodes) if self.groups % nodes == 0 else (1, 1)
        if shape.experts % groups:
            raise PlacementError(f"{shape.experts} experts do not divide into {groups} groups")
        return groups, nodes


def _plan_hierarchical(
    weight: npt.NDArray[np.float32], shape: ExpertShape, groups: int, nodes: int
) -> _Indices:
    """The expert of each slot, int64 (layers, slots), with no regard to what is installed."""
    layers, experts = weight.shape
    group_size, node_experts, node_slots = (
        experts // groups,
        experts // nodes,
        shape.slots // nodes,
    )
    group_places = _pack(weight.reshape(layers, groups, group_size).sum(axis=-1), nodes)
    # Experts in the order of the nodes that their groups are packed onto.
    first = group_places[..., None] * group_size + np.arange(group_size)
    expert_at = _inverse(first.reshape(layers, experts))
    node_weight = np.take_along_axis(weight, expert_at, axis=1).reshape(-1, node_experts)
    chosen, replicas = _replicate(node_weight, node_slots)
    slot_weight = np.take_along_axis(node_weight / replicas, chosen, axis=1)
    slot_order = _inverse(_pack(slot_weight, shape.ranks // nodes))
    local = np.take_along_axis(chosen, slot_order, axis=1).reshape(layers, nodes, node_slots)
    places = local + np.arange(nodes)[:, None] * node_experts
    return np.take_along_axis(expert_at, places.reshape(layers, shape.slots), axis=1)


def _pack(weight: _Weights, packs: int) -> _Indices:
    """Places of items, int64 (rows, items), by heaviest first into the lightest pack with room.

    Place p is in pack p // (items // packs).
    """
    rows, items = weight.shape
    room = items // packs
    if room == 1:
        return np.tile(np.arange(items), (rows, 1))
    row = np.arange(rows)
    place = np.empty((rows, items), dtype=np.int64)
    filled = np.zeros((rows, packs), dtype=np.int64)
    total = np.zeros((rows, packs), dtype=np.float64)
    for item in np.argsort(-weight, axis=-1).T:
        pack = total.argmin(axis=1)
        place[row, item] = pack * room + filled[row, pack]
        filled[row, pack] += 1
        total[row, pack] += weight[row, item]
        total[row, pack] = np.where(filled[row, pack] == room, np.inf, total[row, pack])
    return place


def _replicate(
    weight: npt.NDArray[np.float32], slots: int
) -> tuple[_Indices, npt.NDArray[np.int64]]:
    """The expert of each slot, int64 (rows, slots), and replicas, int64 (rows, experts).

    Each redundant slot goes to the expert with the largest load per replica.
    """
    rows, experts = weight.shape
    row = np.arange(rows)
    chosen = np.tile(np.arange(slots), (rows, 1))
    replicas = np.ones((rows, experts), dtype=np.int64)
    for slot in range(experts, slots):
        chosen[:, slot] = (weight / replicas).argmax(axis=-1)
        replicas[row, chosen[:, slot]] += 1
    return chosen, replicas


def _inverse(permutation: _Indices) -> _Indices:
    """The inverse of each row's permutation."""
    inverse = np.empty_like(permutation)
    np.put_along_axis(inverse, permutation, np.arange(permutation.shape[1])[None], axis=1)
    return inverse


def keep_slots(installed: Placement, planned: Placement, shape: ExpertShape) -> Placement:
    """Returns `planned` with every expert that stays on its rank in the slot that it had there.

    The others fill the slots that are left, in the order that they were planned in. All placements
    are int32 (layers, slots).
    """
    before = installed.reshape(-1, shape.slots_per_rank)
    after = planned.reshape(before.shape)
    used = np.zeros(before.shape, dtype=np.bool_)
    kept = np.zeros(before.shape, dtype=np.bool_)
    row = np.arange(len(before))
    for place in range(shape.slots_per_rank):
        same = (after == before[:, place, None]) & ~used
        kept[:, place] = same.any(axis=1)
        stays = row[kept[:, place]]
        used[stays, same[stays].argmax(axis=1)] = True
    result = before.copy()
    # A row has as many places left as experts: both are in the order of rows, then of places.
    result[~kept] = after[~used]
    return result.reshape(planned.shape)


@dataclass(frozen=True)
class RowHash:
    """Sends a row by the hash of its token's place in its rank's batch.

    The hash, Knuth's for 32 bits, modulo the number of replicas says which replica it is, in the
    order of slots; all experts of a token have the same hash. Long batches divide evenly. The first
    token of every rank goes to the first replica, so short ones do not: route those, since `parts`
    is for long ones.
    """

    name: str = "row hash"
    split: SplitKind = SplitKind.DRAWN

    def parts(self, placement: Placement, shape: ExpertShape) -> Parts:
        """One part in the number of its expert's replicas for each slot."""
        layer = np.arange(shape.layers)[:, None] * shape.experts
        keys = placement + layer
        replicas = np.bincount(keys.ravel(), minlength=shape.layers * shape.experts)
        parts: Parts = (1 / replicas[keys]).astype(np.float32)
        return parts

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
        row = np.ascontiguousarray(placement[layer : layer + 1])
        start = np.empty(shape.experts + 1, dtype=np.int32)
        replicas, cumulative = np.empty((2, shape.slots), dtype=np.int32)
        _native.build_table(
            row[0], even_shares(row, shape.experts)[0], shape.experts, start, replicas, cumulative
        )
        slots = np.empty(ids.shape, dtype=np.int32)
        counts = np.empty(shape.experts, dtype=np.int32)
        flat = np.ascontiguousarray(ids, dtype=np.int32)
        # Each rank routes its own batch, whose rows it counts from 0.
        edges = [0, *(np.flatnonzero(np.diff(sources)) + 1).tolist(), len(ids)]
        for begin, end in pairwise(edges):
            _native.route_by_row_hash(
                flat[begin:end].reshape(-1),
                start,
                replicas,
                ids.shape[1],
                end - begin,
                slots[begin:end].reshape(-1),
                counts,
            )
        slots[slots == shape.slots] = ABSENT
        return slots


def initial_placement(shape: ExpertShape) -> Placement:
    """All experts in order, then the first ones again in the redundant slots.

    Returns int32 (layers, slots). Raises `PlacementError` for more redundant slots than vLLM takes.
    """
    if shape.slots - shape.experts > _MAX_REDUNDANT:
        raise PlacementError(
            f"vLLM takes at most {_MAX_REDUNDANT} redundant slots, "
            f"got {shape.slots - shape.experts}"
        )
    row = np.arange(shape.slots, dtype=np.int32) % shape.experts
    return np.tile(row, (shape.layers, 1))


VLLM = EngineModel(
    name="vllm",
    version="0.33.0",
    cadence=Cadence(
        window=1000,
        interval=3000,
        # The count of steps begins at three quarters of the interval.
        first=750,
        layers_per_step=1,
        blocking=False,
        source="EPLBConfig in vllm/config/parallel.py, EplbState.add_model and step",
    ),
    planner=DefaultPolicy(),
    rules=(RowHash(),),
    policies={eplb_policy.NAME: eplb_policy.plan_from_installed},
    initial=initial_placement,
)
