"""Rows that each rank gets of a hashed pass, drawn again from the counts of the batch; for reports.

A hashed pass draws by positions, which counts do not have: the rows are drawn again, with the same
odds. Their expectation would miss the imbalance that the draw itself makes, which is most of it in
a small batch.
"""

import numpy as np
import torch

from equipoise.balancer.experts.placement import (
    BatchCounts,
    ExpertShape,
    Layout,
    RankRows,
    logical_maps,
)
from equipoise.balancer.experts.routing.rank_rows import sum_by_rank, total_counts
from equipoise.hal.routing import POSITIONS, position_counts


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
    return sum_by_rank(rows, np.maximum(slots, 0), shape)
