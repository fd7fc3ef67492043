"""Swaps after a plan, so that ranks are level even where replicas take equal parts.

`incremental` levels ranks by shares alone, which may be as uneven as it takes. Local levelling then
has little room on some ranks. What is tried here: experts with one replica change places, so that
the shares have less to do.
"""

import numpy as np

from equipoise.balancer.experts.placement import ExpertShape, Load, Placement
from lib.share_routing import Counts


def level_even_split(placement: Placement, load: Load, shape: ExpertShape, swaps: int) -> Placement:
    """Up to so many swaps in each layer, each the best one for the rank with the most load."""
    rows = zip(placement, load, strict=True)
    return np.stack([_level_row(row, counts, shape, swaps) for row, counts in rows])


def _level_row(placement: Placement, load: Counts, shape: ExpertShape, swaps: int) -> Placement:
    row, copies = placement.copy(), np.bincount(placement, minlength=shape.experts)
    homes = np.arange(shape.slots) // shape.slots_per_rank
    ranks = np.bincount(homes, weights=load[row] / copies[row], minlength=shape.ranks)
    movable = np.flatnonzero(copies[row] == 1)
    for _ in range(swaps):
        fullest = ranks.argmax()
        here, there = (movable[(homes[movable] == fullest) == own] for own in (True, False))
        if not (here.size and there.size):
            break
        difference = load[row[here]][:, None] - load[row[there]]
        # Of the two ranks, what the sum of squares falls by, halved.
        gain = difference * (ranks[fullest] - ranks[homes[there]] - difference)
        best = np.unravel_index(gain.argmax(), gain.shape)
        if gain[best] <= 0:
            break
        one, other = here[best[0]], there[best[1]]
        row[one], row[other] = row[other], row[one]
        ranks[fullest] -= difference[best]
        ranks[homes[other]] += difference[best]
    return row
