"""From slots to the maps of logical experts that engines keep beside them."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.placement import Placement

Ids = npt.NDArray[np.int64]
ABSENT = -1
"""Where an expert has fewer slots than the map is wide; and a slot that holds nothing."""


class Maps(NamedTuple):
    """Both int64.

    Attributes:
        slots: (layers, experts, width), the slots of each expert, ascending, then -1.
        counts: (layers, experts), how many slots it has.
    """

    slots: Ids
    counts: Ids


def logical_maps(placement: Ids | Placement, experts: int, width: int | None = None) -> Maps:
    """Maps of `placement` (layers, slots); slots of -1 hold nothing.

    `width` is the largest number of copies by default.
    """
    layers = placement.shape[0]
    layer, slot = np.nonzero(placement >= 0)
    key = layer * experts + placement[layer, slot].astype(np.int64)
    order = np.argsort(key, kind="stable")
    counts = np.bincount(key, minlength=layers * experts)
    first = np.cumsum(counts) - counts
    copy = np.arange(key.size) - first[key[order]]
    wide = max(int(counts.max()), 1) if width is None else width
    found = np.full((layers * experts, wide), ABSENT, dtype=np.int64)
    found[key[order], copy] = slot[order]
    return Maps(found.reshape(layers, experts, wide), counts.reshape(layers, experts))
