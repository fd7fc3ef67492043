"""Rows that each rank gets of a batch, from the counts of the batch alone; for reports.

Levelled quotas, and replicas in turn, are a function of the counts, so these are the very rows.
Without torch, so that commands that only read files can use them.
"""

import numpy as np
import numpy.typing as npt

from equipoise import _native
from equipoise.balancer.experts.placement import (
    BatchCounts,
    ExpertShape,
    Layout,
    Load,
    RankRows,
    logical_maps,
)


def total_counts(counts: BatchCounts) -> Load:
    """Returns the rows of all batches, int64 (layers, experts)."""
    total: Load = counts.sum(axis=0, dtype=np.int64)
    return total


def levelled_rank_rows(
    counts: BatchCounts, layout: Layout, shape: ExpertShape, groups: int | None = None
) -> RankRows:
    """Returns the rows that levelled routing gives each rank, to the row.

    Args:
        counts: of the batches; int32.
        layout: its shares are not read.
        shape: numbers of layers, experts, slots and ranks.
        groups: number of groups of neighbouring batches, each divided as one batch; None if each
            batch is divided by itself.
    """
    parts = counts
    if groups is not None:
        parts = counts.reshape(groups, -1, *counts.shape[1:]).sum(axis=1, dtype=np.int32)
    start = np.empty((shape.layers, shape.experts + 1), dtype=np.int32)
    replicas, cumulative = np.empty((2, shape.layers, shape.slots), dtype=np.int32)
    _native.build_tables(
        layout.placement, layout.shares, shape.experts, start, replicas, cumulative
    )
    rows = np.empty((shape.layers, shape.slots), dtype=np.int64)
    for layer in range(shape.layers):
        batches, grouped = np.ascontiguousarray(parts[:, layer]), groups is not None
        table = start[layer], replicas[layer]
        _native.levelled_rows(batches, *table, shape.ranks, layer, grouped, rows[layer])
    rank_rows: RankRows = rows.reshape(shape.layers, shape.ranks, -1).sum(axis=2)
    return rank_rows


def even_rank_rows(counts: BatchCounts, layout: Layout, shape: ExpertShape) -> RankRows:
    """Returns the rows of each rank if the replicas of an expert take turns: even, to the row."""
    total, slots = total_counts(counts), logical_maps(layout.placement, shape.experts)
    copies = slots.replica_count[:, :, None]
    turn = np.arange(slots.logical_to_physical.shape[2])
    rows = (total[:, :, None] + copies - 1 - turn) // copies
    present = slots.logical_to_physical >= 0
    return sum_by_rank(np.where(present, rows, 0), np.maximum(slots.logical_to_physical, 0), shape)


def sum_by_rank(
    rows: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], shape: ExpertShape
) -> RankRows:
    """Returns the sums of `rows` of `slots`, both (layers, experts, replicas), by rank."""
    rank_rows = np.zeros((shape.layers, shape.ranks), dtype=np.int64)
    layers = np.arange(shape.layers)[:, None, None]
    np.add.at(rank_rows, (layers, slots // shape.slots_per_rank), rows)
    return rank_rows
