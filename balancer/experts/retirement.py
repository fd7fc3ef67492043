"""Which slots retire, so that a layer can change that needs more staging than there is.

A retired slot is written beside the forward, at once, and takes no staging. The price is that its
expert has a copy less until the layer is committed; so no more retire than have to.
"""

from collections.abc import Sequence

import numpy as np

from equipoise.balancer.experts.group import Group
from equipoise.balancer.experts.layout import NOTHING, Layout, Retired
from equipoise.balancer.experts.placement import Placement, Shares


def retiring(
    installed: Layout, proposed: Placement, layer: int, group: Group, staging: int
) -> Retired | None:
    """What has to retire in `layer` so that no rank stages more than `staging` copies of it.

    None where that is not found, since an expert would be left without a slot that serves, or
    would not survive what the group has to: swaps of experts that have one copy each take staging.
    On each rank go first those slots whose expert has most copies left, then those with the
    smallest share, then the lowest; that is not tried again in another order.

    Args:
        installed: what is served now; slots that are retired already need no staging.
        proposed: int32 (layers, slots), what shall be installed.
        layer: which.
        group: how many of everything, and what is to be survived.
        staging: buffers of a rank.
    """
    held, shares = installed.held[layer].copy(), installed.shares[layer]
    changing = (held != NOTHING) & (held != proposed[layer])
    per = group.shape.slots_per_rank
    excess = changing.reshape(group.shape.ranks, per).sum(axis=1) - staging
    found: list[tuple[int, int]] = []
    for rank in np.flatnonzero(excess > 0).tolist():
        mine = rank * per + np.flatnonzero(changing[rank * per : (rank + 1) * per])
        for _ in range(int(excess[rank])):
            slot = _next(held, shares, mine.tolist(), group)
            if slot is None:
                return None
            held[slot] = NOTHING
            found.append((layer, slot))
    return frozenset(found)


def _next(held: Placement, shares: Shares, mine: Sequence[int], group: Group) -> int | None:
    """The slot that retires next; None where none can."""
    able = [slot for slot in mine if held[slot] != NOTHING and group.spares(held, slot)]
    copies = np.bincount(held[held != NOTHING], minlength=group.shape.experts)
    return min(able, key=lambda slot: (-copies[held[slot]], shares[slot], slot), default=None)
