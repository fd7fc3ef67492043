"""TensorRT-LLM's balancer of experts: greedy plan, round-robin dispatch, a few layers each step.

Sources: NVIDIA/TensorRT-LLM, `cpp/tensorrt_llm/runtime/moeLoadBalancer/moeLoadBalancer.cpp` at
0d919a4f (plan, cadence) and `cpp/tensorrt_llm/kernels/moeLoadBalance/moeLoadBalanceKernels.cu` at
004d78b0 (dispatch, statistics). Nothing of it runs without a GPU, so the model is of the text, and
checked by the values of its own tests. What is exact and what is not: docs/design/replay.md.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.placement import (
    ExpertShape,
    Load,
    Placement,
    logical_maps,
)
from equipoise.report.replay.engine_model import (
    Cadence,
    EngineModel,
    Ids,
    Parts,
    SplitKind,
    WindowLoad,
)
from equipoise.report.replay.engines.greedy_packing import pack_in_order

VERSION = "0d919a4f"
"""Commit of the runtime."""
BLOCK = 1024
"""Consecutive (token, k) pairs of a rank that one block of the routing kernel counts."""
DECAYED_STEPS = 20
"""A load that is multiplied by 0.95 each step weighs as much as so many steps."""

Counts = npt.NDArray[np.int64]


def greedy_placement(load: Load, shape: ExpertShape) -> Placement:
    """Returns the placement of `doReplication` and `doPlacement` for rows (layers, experts).

    Each further slot goes to the largest load per replica, ties to the higher expert; without any
    load slots are divided evenly. Replicas by load, ties by expert, go to the lightest rank with a
    free slot. In float64, as TensorRT-LLM; the native `plan_greedy` sums whole numbers instead, so
    that equal ranks by rounding may differ.
    """
    weight = load.astype(np.float32).astype(np.float64)
    counts = _replica_counts(weight, shape.slots)
    layers = shape.layers
    experts = np.tile(np.arange(shape.experts), layers)
    expert = np.repeat(experts, counts.reshape(-1)).reshape(layers, shape.slots)
    size = np.take_along_axis(weight / counts, expert, axis=1)
    order = np.argsort(-size, axis=1, kind="stable")
    rank, place = pack_in_order(np.take_along_axis(size, order, axis=1), shape.ranks)
    placement = np.empty((layers, shape.slots), dtype=np.int32)
    slot = rank * shape.slots_per_rank + place
    np.put_along_axis(placement, slot, np.take_along_axis(expert, order, axis=1), axis=1)
    return placement


def _replica_counts(weight: npt.NDArray[np.float64], slots: int) -> Counts:
    layers, experts = weight.shape
    counts, layer = np.ones((layers, experts), dtype=np.int64), np.arange(layers)
    for _ in range(slots - experts):
        largest = experts - 1 - (weight / counts)[:, ::-1].argmax(axis=1)
        counts[layer, largest] += 1
    even = slots // experts + (np.arange(experts) < slots % experts)
    return np.where(weight.any(axis=1, keepdims=True), counts, even)


@dataclass(frozen=True)
class GreedyPlanner:
    """The plan for the rows of a window.

    TensorRT-LLM plans each layer by a sum that decays by 0.95 each step, and that starts from zero
    when the layer gets a new placement. Here the window's rows count alike.
    """

    def __call__(self, load: WindowLoad, installed: Placement, shape: ExpertShape) -> Placement:
        """Returns the next placement; `installed` does not matter to it."""
        return greedy_placement(load.experts, shape)


@dataclass(frozen=True)
class RoundRobinDispatch:
    """An expert's rows go to its replicas in turn, by `moeComputeRouteKernel`. Exact.

    Turns start anew in every block of 1,024 pairs of a rank; the first is that of the number of the
    block plus the rank, as with attention data parallelism, where each rank has rows of its own.
    """

    name: str = "round_robin"
    split: SplitKind = SplitKind.IN_TURN

    def parts(self, placement: Placement, shape: ExpertShape) -> Parts:
        """Returns equal parts. Single batches are nearer to them than draws would be."""
        counts = logical_maps(placement, shape.experts).replica_count
        parts: Parts = (1 / np.take_along_axis(counts, placement.astype(np.int64), axis=1)).astype(
            np.float32
        )
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
        """Returns the slot of each id; `step` does not matter."""
        maps = logical_maps(placement[layer : layer + 1], shape.experts)
        flat = ids.reshape(-1).astype(np.int64)
        rank = np.repeat(sources, ids.shape[1]).astype(np.int64)
        block = _occurrence(rank) // BLOCK
        # -1 is one more value, so that it is not taken for an expert of the block before.
        group = rank * (block.max(initial=0) + 1) + block
        turn = _occurrence(group * (shape.experts + 1) + flat + 1) + block + rank
        place = turn % maps.replica_count[0, flat]
        slots = np.where(flat >= 0, maps.logical_to_physical[0, flat, place], -1)
        return slots.astype(np.int32).reshape(ids.shape)


def _occurrence(keys: Counts) -> Counts:
    """Returns how many equal keys stand before each."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    lengths = np.diff(starts, append=len(keys))
    found = np.empty(len(keys), dtype=np.int64)
    found[order] = np.arange(len(keys)) - np.repeat(starts, lengths)
    return found


def update_cadence(layers: int, layer_updates_per_iter: int) -> Cadence:
    """Returns the cadence of `generateUpdatePlan`: so many layers plan and move in each step.

    Layer l is in group l modulo the number of groups, and groups take turns; where the first and
    the last group have as many layers, a step without updates follows. The worker updates a layer
    while others compute, and the layer's next step waits for it.
    """
    groups = -(-layers // layer_updates_per_iter)
    interval = groups + (layers % groups == 0)
    return Cadence(
        window=min(interval, DECAYED_STEPS),
        interval=interval,
        first=1,
        layers_per_step=layer_updates_per_iter,
        blocking=False,
        source=f"TensorRT-LLM {VERSION}: {layers} layers, layer_updates_per_iter "
        f"{layer_updates_per_iter}; its own default is 0, which never updates",
    )


def tensorrt_llm_model(layers: int, layer_updates_per_iter: int) -> EngineModel:
    """Returns the model for a model of so many layers with experts."""
    return EngineModel(
        name="trtllm",
        version=VERSION,
        cadence=update_cadence(layers, layer_updates_per_iter),
        planner=GreedyPlanner(),
        rules=(RoundRobinDispatch(),),
    )


TENSORRT_LLM = tensorrt_llm_model(layers=58, layer_updates_per_iter=2)
"""DeepSeek-V3 and R1 with two updates in a step, as in the examples of wide expert parallelism."""
