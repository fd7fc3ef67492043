"""SGLang's `rebalance_experts`, which dispatches to an expert-location algorithm by name.

Source of the interface: sgl-project/sglang, python/sglang/srt/eplb/eplb_algorithms/__init__.py,
and the outputs of its deepseek.py and deepseek_vec.py: the expert in each slot (layers, slots); the
slots of each expert (layers, experts, width), ascending, padded with -1; and their number (layers,
experts). The algorithm only selects their dtypes and the width. `elasticity_aware` is refused: it
would need to know which ranks are alive.
"""

from typing import TypeAlias

import numpy as np
import torch

from equipoise.balancer.compat.deepseek import check_groups
from equipoise.balancer.compat.input_arrays import ArrayInput, Counts, integer_counts, integer_ids
from equipoise.balancer.compat.placement_policy import (
    EvenSplitPolicy,
    PlacementRequest,
    compute_placement,
)
from equipoise.balancer.experts.placement import Placement, logical_maps
from equipoise.hal.errors import PlacementError

Tensors: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
DTYPES = {
    "deepseek": (torch.int64, torch.int64, torch.int64),
    "deepseek_hierarchical": (torch.int64, torch.int64, torch.int64),
    "deepseek_vec": (torch.int32, torch.int32, torch.int32),
    "deepseek_vec_hierarchical": (torch.int64, torch.int32, torch.int32),
}
"""Dtypes of the three returned tensors, by algorithm."""
FULL_WIDTH = "deepseek_vec"
"""Algorithms with this prefix pad the second tensor to the most replicas that fit."""


def rebalance_experts(
    tokens_per_expert: ArrayInput,
    num_physical_experts: int,
    num_local_physical_experts: int,
    num_groups: int | None,
    num_nodes: int,
    algorithm: object,
    *,
    installed: ArrayInput | None = None,
    policy: str = EvenSplitPolicy.BEST,
) -> Tensors:
    """Plans which expert each slot holds; returns the three tensors that the module describes.

    Args:
        tokens_per_expert: (steps, layers, experts); the steps are summed.
        num_physical_experts: slots per layer.
        num_local_physical_experts: slots per rank.
        num_groups: has to divide the experts, or None; groups are not tied to nodes.
        num_nodes: has to divide the ranks; otherwise without effect.
        algorithm: a member of the engine's `EplbAlgorithm`, or its name.
        installed: (layers, slots), the expert in each slot now, so that few slots change; or None.
        policy: name of an `EvenSplitPolicy`: best, connected or greedy.

    Raises:
        PlacementError: sizes do not fit together, a value is not a count, or the algorithm is
            unknown.
    """
    name = _algorithm(algorithm)
    load = _load(tokens_per_expert, num_groups, num_nodes)
    ranks = _ranks(num_physical_experts, num_local_physical_experts)
    installed_ids = (
        None if installed is None else integer_ids(installed, "installed").astype(np.int32)
    )
    placement = compute_placement(
        load, PlacementRequest(num_physical_experts, ranks, num_nodes, policy), installed_ids
    )
    return _tensors(placement, load.shape[-1], name, _device(tokens_per_expert))


def _algorithm(algorithm: object) -> str:
    name = str(getattr(algorithm, "name", algorithm))
    if name not in DTYPES:
        raise PlacementError(f"algorithm must be one of {', '.join(DTYPES)}, got {name!r}")
    return name


def _load(tokens: ArrayInput, groups: int | None, nodes: int) -> Counts:
    load = integer_counts(tokens, "tokens_per_expert")
    if load.ndim != 3:
        raise PlacementError(
            f"tokens_per_expert must be (steps, layers, experts), got {load.shape}"
        )
    check_groups(load.shape[-1], groups, nodes)
    return load


def _ranks(slots: int, local: int) -> int:
    if local < 1 or slots % local:
        raise PlacementError(f"{slots} slots do not divide into ranks of {local}")
    return slots // local


def _tensors(placement: Placement, experts: int, name: str, device: torch.device) -> Tensors:
    width = placement.shape[1] - experts + 1 if name.startswith(FULL_WIDTH) else None
    maps = logical_maps(placement, experts, width)
    arrays = (placement, maps.logical_to_physical, maps.replica_count)
    target = device if name == FULL_WIDTH else torch.device("cpu")
    first, second, third = (
        torch.from_numpy(array).to(target, dtype)
        for array, dtype in zip(arrays, DTYPES[name], strict=True)
    )
    return first, second, third


def _device(array: ArrayInput) -> torch.device:
    return array.device if isinstance(array, torch.Tensor) else torch.device("cpu")
