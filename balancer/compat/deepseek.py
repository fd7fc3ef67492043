"""DeepSeek's EPLB: `rebalance_experts` with the signature and the outputs of its eplb.py.

Source of the interface: deepseek-ai/EPLB, eplb.py, `rebalance_experts`.
"""

import numpy as np
import torch

from equipoise.balancer.compat.input_arrays import ArrayInput, integer_counts, integer_ids
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
    num_gpus: int,
    *,
    installed: ArrayInput | None = None,
    policy: str = EvenSplitPolicy.BEST,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plans which expert each slot holds, with an even split among replicas.

    Args:
        weight: (layers, experts), tokens of each expert; `input_arrays` says how floats are
            rounded.
        num_replicas: slots per layer, a multiple of `num_gpus`.
        num_groups: has to divide the experts. Groups are not tied to nodes: that cost 0.08 to 0.7
            of imbalance when measured, and only group-limited routing gains from it.
        num_nodes: has to divide the ranks; otherwise without effect.
        num_gpus: number of ranks.
        installed: (layers, slots), the expert in each slot now, so that few slots change; or None.
        policy: name of an `EvenSplitPolicy`: best, connected or greedy.

    Returns:
        phy2log (layers, slots), the expert in each slot; log2phy (layers, experts, most
        replicas), the slots of each expert, ascending, padded with -1; logcnt (layers, experts).
        All int64, on the CPU.

    Raises:
        PlacementError: sizes do not fit together, or a value is not a count.
    """
    load = integer_counts(weight)
    check_groups(load.shape[-1], num_groups, num_nodes)
    installed_ids = (
        None if installed is None else integer_ids(installed, "installed").astype(np.int32)
    )
    placement = compute_placement(
        load, PlacementRequest(num_replicas, num_gpus, num_nodes, policy), installed_ids
    )
    maps = logical_maps(placement, load.shape[-1])
    phy2log = torch.from_numpy(placement.astype(np.int64))
    return phy2log, torch.from_numpy(maps.logical_to_physical), torch.from_numpy(maps.replica_count)


def check_groups(experts: int, groups: int | None, nodes: int) -> None:
    """Raises `PlacementError` for groups that the original refuses.

    The original uses groups only if they divide among the nodes, and plans without them otherwise.
    """
    if groups is None or nodes < 1 or (groups > 0 and groups % nodes):
        return
    if groups < 1 or experts % groups:
        raise PlacementError(f"{experts} experts do not divide into {groups} groups")
