"""TensorRT-LLM's `do_replication` and `do_placement`, with the names of its Python bindings.

Source of the interface: NVIDIA/TensorRT-LLM, cpp/tensorrt_llm/runtime/moeLoadBalancer/
moeLoadBalancer.cpp, and the bindings `do_replication(meta_info, expert_load_factor,
cpu_placement)` and `do_placement` of the same arguments.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from equipoise.balancer.compat.input_arrays import ArrayInput, Counts, integer_counts, to_host_array
from equipoise.balancer.compat.packing import pack_by_load
from equipoise.balancer.compat.placement_policy import (
    EvenSplitPolicy,
    PlacementRequest,
    compute_placement,
)
from equipoise.balancer.experts.placement import Placement, logical_maps
from equipoise.hal.errors import PlacementError


class MetaInfo(Protocol):
    """The fields of the engine's `MoeLoadBalanceMetaInfo` that are read."""

    @property
    def expert_count(self) -> int:
        """Number of experts of the layer."""
        ...

    @property
    def ep_size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def slot_count_per_rank(self) -> int:
        """Number of slots per rank."""
        ...


class CpuPlacement(Protocol):
    """The fields of the engine's `MoePlacementCpuInfo` that are written."""

    expert_replica_count: list[int]
    rank_expert_ids: list[list[int]]


@dataclass(frozen=True)
class MoeLoadBalanceMetaInfo:
    """Stand-in for the engine's class of this name, for callers without the engine."""

    expert_count: int
    top_k: int
    ep_rank: int
    ep_size: int
    slot_count_per_rank: int


@dataclass
class MoePlacementCpuInfo:
    """Stand-in for the engine's class of this name, for callers without the engine.

    Attributes:
        expert_replica_count: slots of each expert.
        rank_expert_ids: the expert in each slot of each rank.
    """

    expert_replica_count: list[int] = field(default_factory=list)
    rank_expert_ids: list[list[int]] = field(default_factory=list)


def do_replication(
    meta_info: MetaInfo,
    expert_load_factor: ArrayInput,
    cpu_placement: CpuPlacement,
    *,
    policy: str = EvenSplitPolicy.BEST,
) -> None:
    """Writes the number of slots of each expert to `cpu_placement.expert_replica_count`.

    Args:
        meta_info: `expert_count`, `ep_size` ranks, `slot_count_per_rank` slots each.
        expert_load_factor: (experts,), load of one layer.
        cpu_placement: written.
        policy: name of an `EvenSplitPolicy`: best, connected or greedy.

    Raises:
        PlacementError: sizes do not fit together, or a value is not a count.
    """
    load = _load(meta_info, expert_load_factor)
    cpu_placement.expert_replica_count = _counts(_compute_placement(meta_info, load, policy), load)


def do_placement(
    meta_info: MetaInfo,
    expert_load_factor: ArrayInput,
    cpu_placement: CpuPlacement,
    *,
    policy: str = EvenSplitPolicy.BEST,
) -> None:
    """Writes the expert in each slot to `cpu_placement.rank_expert_ids`.

    If the counts are those of `do_replication` for this load and policy, the result is its plan.
    For other counts, replicas are assigned by size to the least loaded rank, as TensorRT-LLM does.

    Args:
        meta_info: `expert_count`, `ep_size` ranks, `slot_count_per_rank` slots each.
        expert_load_factor: (experts,), load of one layer.
        cpu_placement: `expert_replica_count` is read, `rank_expert_ids` written.
        policy: name of an `EvenSplitPolicy`: best, connected or greedy.

    Raises:
        PlacementError: sizes do not fit together, or a value is not a count.
    """
    load = _load(meta_info, expert_load_factor)
    copies = [int(count) for count in cpu_placement.expert_replica_count]
    slots = meta_info.ep_size * meta_info.slot_count_per_rank
    if len(copies) != load.shape[1] or min(copies) < 1 or sum(copies) != slots:
        raise PlacementError(
            f"expert_replica_count must be {load.shape[1]} positive numbers that sum to {slots}"
        )
    placement = _compute_placement(meta_info, load, policy)
    if _counts(placement, load) == copies:
        rows = placement.reshape(meta_info.ep_size, -1).tolist()
    else:
        rows = pack_by_load(load[0].tolist(), copies, meta_info.ep_size)
    cpu_placement.rank_expert_ids = rows


def _load(meta_info: MetaInfo, factor: ArrayInput) -> Counts:
    array = to_host_array(factor)
    if array.shape != (meta_info.expert_count,):
        raise PlacementError(
            f"expert_load_factor must be ({meta_info.expert_count},), got {array.shape}"
        )
    return integer_counts(np.atleast_2d(array), "expert_load_factor")


def _compute_placement(meta_info: MetaInfo, load: Counts, policy: str) -> Placement:
    slots = meta_info.ep_size * meta_info.slot_count_per_rank
    return compute_placement(load, PlacementRequest(slots, meta_info.ep_size, policy=policy))


def _counts(placement: Placement, load: Counts) -> list[int]:
    replica_counts: list[int] = logical_maps(placement, load.shape[1]).replica_count[0].tolist()
    return replica_counts
