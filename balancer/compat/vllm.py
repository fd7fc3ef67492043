"""vLLM's EPLB policy: what its `AbstractEplbPolicy` and `DefaultEplbPolicy` offer.

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
    """Where the copies of experts go.

    Args:
        weight: (layers, experts), tokens of each expert in the window.
        num_replicas: slots of a layer, a multiple of `num_ranks`.
        num_groups: divides the experts; groups are not tied to nodes.
        num_nodes: of as many ranks each; has to divide them, and changes nothing.
        num_ranks: ranks.
        old_global_expert_indices: (layers, slots), what is in the slots now. With it little moves:
            nothing where the ranks are level to 2 %. Where it lacks experts, has empty slots (-1),
            or another number of slots, as when the group grows or shrinks, the plan is new.
        policy: best, connected or greedy, as `rules` says.

    Returns:
        The expert in each slot, int64 (layers, slots), on the CPU.

    Raises:
        PlacementError: numbers cannot fit together, or one is no count.
    """
    load = integer_counts(weight)
    check_groups(load.shape[-1], num_groups, num_nodes)
    wish = PlacementRequest(num_replicas, num_ranks, num_nodes, policy)
    if old_global_expert_indices is None:
        return torch.from_numpy(compute_placement(load, wish).astype(np.int64))
    old = integer_ids(old_global_expert_indices, "old_global_expert_indices")
    if _is_complete(old, load, num_replicas):
        return torch.from_numpy(
            compute_placement(load, wish, old.astype(np.int32)).astype(np.int64)
        )
    fresh = compute_placement(load, wish).astype(np.int64)
    return torch.from_numpy(preserve_intragpu_slots(fresh, num_ranks, old))


def preserve_intragpu_slots(
    phy2log: npt.NDArray[np.integer], num_ranks: int, old_phy2log: npt.NDArray[np.integer]
) -> npt.NDArray[np.integer]:
    """`phy2log` (layers, slots) with each rank's experts in the slots they had, where they stay.

    The others fill the free slots in their order. Experts stay on their rank. Unchanged where the
    slots do not divide among the ranks, or the old map has another shape.
    """
    if num_ranks <= 0 or phy2log.shape != old_phy2log.shape or phy2log.shape[1] % num_ranks:
        return phy2log
    kept = phy2log.copy()
    size = phy2log.shape[1] // num_ranks
    for layer in range(phy2log.shape[0]):
        for first in range(0, phy2log.shape[1], size):
            part = slice(first, first + size)
            kept[layer, part] = _keep_slots(phy2log[layer, part], old_phy2log[layer, part])
    return kept


def compute_logical_maps(
    physical_to_logical_map: torch.Tensor, num_logical_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots and number of slots of each expert.

    Args:
        physical_to_logical_map: (layers, slots) or (slots,), on the CPU, any integers; -1 is an
            empty slot.
        num_logical_experts: experts.

    Returns:
        (layers, experts, most copies), ascending, then -1; and (layers, experts). Both of the
        dtype given, and without the layers where none were given.

    Raises:
        PlacementError: the map is not such a tensor, or names an unknown expert.
    """
    given = physical_to_logical_map
    if given.device.type != "cpu" or given.dim() not in (1, 2):
        raise PlacementError(f"expected (layers, slots) on the CPU, got {tuple(given.shape)}")
    placement = integer_ids(given if given.dim() == 2 else given[None], "physical_to_logical_map")
    if placement.size and placement.max() >= num_logical_experts:
        raise PlacementError(f"expert {placement.max()} is outside [0, {num_logical_experts})")
    maps = logical_maps(placement, num_logical_experts)
    slots, counts = (torch.from_numpy(array).to(given.dtype) for array in maps)
    return (slots, counts) if given.dim() == 2 else (slots[0], counts[0])


class EplbPolicy:
    """For the table of policies: the class methods that vLLM calls on `DefaultEplbPolicy`."""

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
    """One rank's experts."""
    waiting = new.tolist()
    found: list[int | None] = []
    for expert in old.tolist():
        found.append(expert if expert in waiting else None)
        if expert in waiting:
            waiting.remove(expert)
    return np.array([waiting.pop(0) if e is None else e for e in found], dtype=new.dtype)
