"""Which slots retire, so that a layer can change that needs more staging than there is.

A retired slot is written beside the forward, at once, and takes no staging. The price is that its
expert has a copy less until the layer is committed; so no more retire than have to.
"""

import numpy as np

from equipoise.balancer.experts.layout import Layout, Retired
from equipoise.balancer.experts.placement import Placement, Shape


def retiring(
    installed: Layout, proposed: Placement, layer: int, shape: Shape, staging: int
) -> Retired | None:
    """What has to retire in `layer` so that no rank stages more than `staging` copies of it.

    None where that cannot be, since an expert would be left without a slot that serves: swaps of
    experts that have one copy each take staging. On each rank go first those slots whose expert has
    most copies to spare, then those with the smallest share, then the lowest.

    Args:
        installed: what is served now; slots that are retired already need no staging.
        proposed: int32 (layers, slots), what shall be installed.
        layer: which.
        shape: how many of everything.
        staging: buffers of a rank.
    """
    held, shares = installed.held[layer], installed.shares[layer]
    changing = (held >= 0) & (held != proposed[layer])
    excess = changing.reshape(shape.ranks, -1).sum(axis=1) - staging
    spare = np.bincount(held[held >= 0], minlength=shape.experts) - 1
    found: list[tuple[int, int]] = []
    for rank in np.flatnonzero(excess > 0).tolist():
        first = rank * shape.slots_per_rank
        mine = first + np.flatnonzero(changing[first : first + shape.slots_per_rank])
        for _ in range(int(excess[rank])):
            order = np.lexsort((mine, shares[mine], -spare[held[mine]]))
            slot = int(mine[order[0]])
            if spare[held[slot]] == 0:
                return None
            spare[held[slot]] -= 1
            mine = mine[mine != slot]
            found.append((layer, slot))
    return frozenset(found)
