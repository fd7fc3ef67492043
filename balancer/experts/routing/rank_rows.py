"""Rows that each rank gets of a batch, from the counts of the batch alone; for reports.

Levelled quotas are a function of the counts, so these are the very rows. A hashed pass draws by
positions, which counts do not have: there the rows are drawn again, with the same odds. Their
expectation would miss the imbalance that the draw itself makes, which is most of it in a small
batch.
"""

import numpy as np
import numpy.typing as npt
import torch

from equipoise import _native
from equipoise.balancer.experts.placement import (
    BatchCounts,
    ExpertShape,
    Layout,
    Load,
    RankRows,
    logical_maps,
)
from equipoise.balancer.experts.routing.layer_update import table_update
from equipoise.hal.routing import POSITIONS, position_counts


def total_counts(counts: BatchCounts) -> Load:
    """Returns the rows of all batches, int64 (layers, experts)."""
    total: Load = counts.sum(axis=0, dtype=np.int64)
    return total


def drawn_rank_rows(counts: BatchCounts, layout: Layout, shape: ExpertShape, step: int) -> RankRows:
    """Returns the rows of a hashed pass by the shares of `layout`, drawn with `step` as the seed.

    Each row draws one of 256 positions, as in `equipoise.hal.routing`, so that a replica gets its
    share rounded to 1 / 256. The draw is not the one that was made, but one like it, and the same
    on every rank that reports it.
    """
    slots = logical_maps(layout.placement, shape.experts).logical_to_physical
    layers = np.arange(shape.layers)[:, None, None]
    shares = np.where(slots < 0, 0, layout.shares[layers, slots])
    ends = position_counts(torch.from_numpy(shares).cumsum(2)).numpy()
    odds = np.diff(ends, axis=2, prepend=0) / POSITIONS
    rows = np.random.default_rng(step).multinomial(total_counts(counts), odds)
    return _by_rank(rows, np.maximum(slots, 0), shape)


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
    tables = table_update(layout, shape, range(shape.layers))
    experts = np.arange(shape.experts, dtype=np.int32)
    before = np.zeros(shape.experts, dtype=np.int32)
    rank_rows = np.zeros((shape.layers, shape.ranks), dtype=np.int64)
    for layer, number in np.argwhere(parts.any(axis=2).T).tolist():
        part = np.ascontiguousarray(parts[number, layer])
        ids = np.repeat(experts, part)
        slots, counted = np.empty_like(ids), np.empty_like(part)
        _native.route_levelled(
            ids,
            tables.start[layer],
            tables.replicas[layer],
            shape.ranks,
            number,
            layer,
            slots,
            counted,
            *(() if groups is None else (part, before)),
        )
        rank_rows[layer] += np.bincount(slots // shape.slots_per_rank, minlength=shape.ranks)
    return rank_rows


def even_rank_rows(counts: BatchCounts, layout: Layout, shape: ExpertShape) -> RankRows:
    """Returns the rows of each rank if the replicas of an expert take turns: even, to the row."""
    total, slots = total_counts(counts), logical_maps(layout.placement, shape.experts)
    copies = slots.replica_count[:, :, None]
    turn = np.arange(slots.logical_to_physical.shape[2])
    rows = (total[:, :, None] + copies - 1 - turn) // copies
    present = slots.logical_to_physical >= 0
    return _by_rank(np.where(present, rows, 0), np.maximum(slots.logical_to_physical, 0), shape)


def _by_rank(
    rows: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], shape: ExpertShape
) -> RankRows:
    """Sums `rows` of `slots`, both (layers, experts, replicas), by rank."""
    rank_rows = np.zeros((shape.layers, shape.ranks), dtype=np.int64)
    layers = np.arange(shape.layers)[:, None, None]
    np.add.at(rank_rows, (layers, slots // shape.slots_per_rank), rows)
    return rank_rows
