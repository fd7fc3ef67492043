"""vLLM's EPLB policy, with the interface of `AbstractEplbPolicy` and `DefaultEplbPolicy`.

Source of the interfaces: vllm-project/vllm, vllm/distributed/eplb/policy/default.py, and
`compute_logical_maps` in vllm/distributed/eplb/eplb_state.py.
"""

import numpy as np
import numpy.typing as npt
import torch

from equipoise.balancer.compat.deepseek import check_groups
from equipoise.balancer.compat.input_arrays import ArrayInput, Counts, integer_counts, integer_ids
from equipoise.balancer.compat.placement_policy import (
    EvenSplitPolicy,
    PlacementRequest,
    compute_placement,
)
from equipoise.balancer.experts.placement import logical_maps
from equipoise.hal.errors import PlacementError


def rebalance_experts(
    weight: ArrayInput,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
    old_global_expert_indices: ArrayInput | None = None,
    *,
    policy: str = EvenSplitPolicy.BEST,
) -> torch.Tensor:
    """Plans which expert each slot holds.

    Args:
        weight: (layers, experts), tokens of each expert in the window.
        num_replicas: slots per layer, a multiple of `num_ranks`.
        num_groups: has to divide the experts; groups are not tied to nodes.
        num_nodes: has to divide the ranks; otherwise without effect.
        num_ranks: number of ranks.
        old_global_expert_indices: (layers, slots), the expert in each slot now. With it few slots
            change: none if the ranks are even to 2 %. If it lacks experts, has empty slots (-1) or
            another number of slots, as when the group grows or shrinks, the plan starts from
            scratch.
        policy: name of an `EvenSplitPolicy`: best, connected or greedy.

    Returns:
        The expert in each slot, int64 (layers, slots), on the CPU.

    Raises:
        PlacementError: sizes do not fit together, or a value is not a count.
    """
    load = integer_counts(weight)
    check_groups(load.shape[-1], num_groups, num_nodes)
    request = PlacementRequest(num_replicas, num_ranks, num_nodes, policy)
    if old_global_expert_indices is None:
        return torch.from_numpy(compute_placement(load, request).astype(np.int64))
    old = integer_ids(old_global_expert_indices, "old_global_expert_indices")
    if _is_complete(old, load, num_replicas):
        return torch.from_numpy(
            compute_placement(load, request, old.astype(np.int32)).astype(np.int64)
        )
    fresh = compute_placement(load, request).astype(np.int64)
    return torch.from_numpy(preserve_intragpu_slots(fresh, num_ranks, old))


def preserve_intragpu_slots(
    phy2log: npt.NDArray[np.integer], num_ranks: int, old_phy2log: npt.NDArray[np.integer]
) -> npt.NDArray[np.integer]:
    """Reorders each rank's experts in `phy2log` (layers, slots) so that they keep their old slots.

    New experts fill the free slots in their order. No expert changes its rank. Returns `phy2log`
    itself if the slots do not divide among the ranks, or the old map has another shape.
    """
    if num_ranks <= 0 or phy2log.shape != old_phy2log.shape or phy2log.shape[1] % num_ranks:
        return phy2log
    reordered_placement = phy2log.copy()
    size = phy2log.shape[1] // num_ranks
    for layer in range(phy2log.shape[0]):
        for first in range(0, phy2log.shape[1], size):
            part = slice(first, first + size)
            reordered_placement[layer, part] = _keep_slots(
                phy2log[layer, part], old_phy2log[layer, part]
            )
    return reordered_placement


def compute_logical_maps(
    physical_to_logical_map: torch.Tensor, num_logical_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the slots, and the number of slots, of each expert.

    Args:
        physical_to_logical_map: (layers, slots) or (slots,), on the CPU, any integers; -1 is an
            empty slot.
        num_logical_experts: experts.

    Returns:
        (layers, experts, most replicas), ascending, padded with -1; and (layers, experts). Both
        have the dtype of the argument, and no axis of layers if it has none.

    Raises:
        PlacementError: the map is not such a tensor, or names an unknown expert.
    """
    array = physical_to_logical_map
    if array.device.type != "cpu" or array.dim() not in (1, 2):
        raise PlacementError(f"expected (layers, slots) on the CPU, got {tuple(array.shape)}")
    placement = integer_ids(array if array.dim() == 2 else array[None], "physical_to_logical_map")
    if placement.size and placement.max() >= num_logical_experts:
        raise PlacementError(f"expert {placement.max()} is outside [0, {num_logical_experts})")
    maps = logical_maps(placement, num_logical_experts)
    slots, counts = (torch.from_numpy(table).to(array.dtype) for table in maps)
    return (slots, counts) if array.dim() == 2 else (slots[0], counts[0])


class EplbPolicy:
    """An entry for vLLM's table of policies: the methods that it calls on `DefaultEplbPolicy`."""

    rebalance_experts = staticmethod(rebalance_experts)
    preserve_intragpu_slots = staticmethod(preserve_intragpu_slots)


def _is_complete(old: Counts, load: Counts, slots: int) -> bool:
    layers, experts = load.shape
    if old.shape != (layers, slots) or old.min() < 0 or old.max() >= experts:
        return False
    return bool((logical_maps(old, experts).replica_count > 0).all())


def _keep_slots(
    new: npt.NDArray[np.integer], old: npt.NDArray[np.integer]
) -> npt.NDArray[np.integer]:
    """Orders one rank's new experts so that those it had before keep their slots."""
    waiting = new.tolist()
    expert_by_slot: list[int | None] = []
    for expert in old.tolist():
        expert_by_slot.append(expert if expert in waiting else None)
        if expert in waiting:
            waiting.remove(expert)
    return np.array([waiting.pop(0) if e is None else e for e in expert_by_slot], dtype=new.dtype)
