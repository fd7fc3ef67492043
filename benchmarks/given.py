"""A trial from statistics that somebody recorded, in any format that is read."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from loads import Counts
from shapes import BATCHES, WINDOWS, Shape, Trial

from equipoise.balancer import formats
from equipoise.hal.errors import PlacementError

NODE = 8
"""Ranks of a node, where they can be divided so."""
GROUPS = 8


def trial_of(paths: Sequence[Path]) -> Trial:
    """The windows of the files in their order, summed into at most `WINDOWS` of equal length.

    Batches are recorded windows of a sum. No switch is known of. Raises `FormatError`, and
    `PlacementError` where the files do not fit together or tell of fewer than two windows.
    """
    found = [formats.read_statistics(path) for path in paths]
    for path, statistics in zip(paths, found, strict=True):
        if statistics.counts.shape[1:] != found[0].counts.shape[1:]:
            shapes = " x ".join(map(str, statistics.counts.shape[1:]))
            first = " x ".join(map(str, found[0].counts.shape[1:]))
            raise PlacementError(f"{path}: {shapes} layers x experts, and {first} in {paths[0]}")
    counts: Counts = np.concatenate([statistics.counts for statistics in found])
    if len(counts) < 2:
        raise PlacementError(f"{paths[0]}: one window, and a plan is judged by the next")
    spans = np.array_split(counts, min(WINDOWS, len(counts)))
    return Trial(
        [span.sum(axis=0) for span in spans],
        [False] * len(spans),
        [list(span[np.linspace(0, len(span) - 1, BATCHES).astype(int)]) for span in spans],
    )


def shape_of(trial: Trial, ranks: int, slots: int | None) -> Shape:
    """The shape of a trial; by default at least one slot a rank more than experts."""
    layers, experts = trial.loads[0].shape
    chosen = ranks * (-(-experts // ranks) + 1) if slots is None else slots
    nodes = ranks // NODE if ranks % NODE == 0 else 1
    return Shape(layers, experts, chosen, ranks, nodes, GROUPS)
