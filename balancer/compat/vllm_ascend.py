"""vllm-ascend's EPLB policy for its first model runner: `rebalance_experts` on tables by rank.

Source of the interface: vllm-project/vllm-ascend, vllm_ascend/eplb/core/policy/policy_abstract.py,
policy_default_eplb.py, policy_swift_balancer.py, and the checks of its eplb_worker.py: every expert
has a slot, none has two on a rank, and an expert that stays on its rank keeps its slot.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.balancer.compat.input_arrays import (
    UNKNOWN_COUNT,
    ArrayInput,
    Counts,
    check_counts,
    integer_ids,
    to_host_array,
)
from equipoise.balancer.compat.input_arrays import integer_counts as whole_numbers
from equipoise.balancer.compat.placement_policy import (
    EvenSplitPolicy,
    PlacementRequest,
    compute_placement,
    max_rank_rows,
)
from equipoise.balancer.experts.placement import ExpertShape, Placement, check_placement
from equipoise.hal.errors import PlacementError

Table = list[list[list[int]]]
"""The expert in each slot, by layer, rank and slot."""


def rebalance_experts(
    current_expert_table: ArrayInput,
    expert_workload: ArrayInput,
    *,
    policy: str = EvenSplitPolicy.BEST,
) -> tuple[int, npt.NDArray[np.int64], Table]:
    """Plans a table with an even load from the current table and the load of its slots.

    Args:
        current_expert_table: (layers, ranks, slots of a rank), the expert in each slot.
        expert_workload: the tokens of each slot, in the same shape; -1 if unknown. A further
            leading axis, of stages, is summed.
        policy: name of an `EvenSplitPolicy`: best, connected or greedy.

    Returns:
        1 if the table changed, else 0; the layers, int64, ordered by how much the load of their
        fullest rank falls; the new table.

    Raises:
        PlacementError: the shapes do not fit together, an expert has no slot, or a value is not
            a count.
    """
    current = parse_installed_load(current_expert_table, expert_workload)
    request = PlacementRequest(current.shape.slots, current.shape.ranks, policy=policy)
    placement = compute_placement(current.load, request, current.installed)
    changed = int((placement != current.installed).any())
    return changed, current.layers_by_relief(placement), current.to_tables(placement).tolist()


@dataclass(frozen=True)
class InstalledLoad:
    """The installed placement of an engine, with its load.

    Attributes:
        load: int64 (layers, experts), tokens of each expert.
        installed: int32 (layers, slots), the expert in each slot.
        shape: numbers of layers, experts, slots and ranks.
    """

    load: Counts
    installed: Placement
    shape: ExpertShape

    def layers_by_relief(self, placement: Placement) -> npt.NDArray[np.int64]:
        """Orders the layers by how much `placement` lowers the load of their fullest rank."""
        ranks = self.shape.ranks
        before, after = (max_rank_rows(self.load, p, ranks) for p in (self.installed, placement))
        order: npt.NDArray[np.int64] = np.argsort(after / np.maximum(before, 1), kind="stable")
        return order

    def to_tables(self, placement: npt.NDArray[np.signedinteger[Any]]) -> npt.NDArray[np.int64]:
        """Converts (layers, slots) to the engine's int64 (layers, ranks, slots of a rank)."""
        shape = self.shape
        return placement.astype(np.int64).reshape(shape.layers, shape.ranks, -1)


def parse_installed_load(
    current_expert_table: ArrayInput, expert_workload: ArrayInput
) -> InstalledLoad:
    """Parses the arguments of `rebalance_experts`. Raises `PlacementError`."""
    table = integer_ids(current_expert_table, "current_expert_table")
    if table.ndim != 3 or 0 in table.shape:
        raise PlacementError(
            f"current_expert_table must be (layers, ranks, slots of a rank), got {table.shape}"
        )
    layers, ranks, size = table.shape
    shape = ExpertShape(layers, int(table.max()) + 1, ranks * size, ranks)
    installed = table.reshape(layers, -1).astype(np.int32)
    check_placement(installed, shape)
    load = _by_expert(_workload(expert_workload, table.shape), installed, shape)
    return InstalledLoad(load, installed, shape)


class EplbPolicy:
    """An entry for the engine's factory of policies; `config` is ignored."""

    def __init__(self, config: object = None) -> None:
        self.config = config

    def set_new_ep_size(self, new_ep_size: int) -> None:
        """Raises `PlacementError`: the engine calls it before its group grows or shrinks."""
        raise PlacementError(f"a group that changes to {new_ep_size} ranks is not planned here")

    def rebalance_experts(
        self, current_expert_table: ArrayInput, expert_workload: ArrayInput
    ) -> tuple[int, npt.NDArray[np.int64], Table]:
        """Calls the function of this name."""
        return rebalance_experts(current_expert_table, expert_workload)


def _workload(workload: ArrayInput, shape: tuple[int, ...]) -> Counts:
    array = to_host_array(workload)
    if array.shape[-3:] != shape or array.ndim > 4 or array.dtype.kind not in "iuf":
        raise PlacementError(f"expert_workload must be numbers {shape}, got {array.shape}")
    counts = np.where(array == UNKNOWN_COUNT, 0, array)
    check_counts(counts, "expert_workload")
    totals: Counts = whole_numbers(counts.reshape(-1, shape[0], shape[1] * shape[2])).sum(axis=0)
    return totals


def _by_expert(workload: Counts, installed: npt.NDArray[np.int32], shape: ExpertShape) -> Counts:
    load = np.zeros((shape.layers, shape.experts), dtype=np.int64)
    np.add.at(load, (np.arange(shape.layers)[:, None], installed), workload)
    return load
