"""What the engine beside a decode step is told to do, in place of plans of its own.

In every epoch and layer some slots of this rank hand their experts on, so that no weight comes from
a peer, of which there are none.
"""

from typing import Any

import numpy as np

from equipoise.balancer.experts.drafting import Draft
from equipoise.balancer.experts.layout import Layout, even_shares
from equipoise.balancer.experts.placement import Load, Placement, Shape
from equipoise.balancer.experts.planner import Freight, Proposal, by_groups, by_ship

BOUNDARY, LOCKED = "boundary", "locked"
STEPS_OF_A_LOT = {BOUNDARY: 2, LOCKED: 1}
"""Steps that a layer's change takes at least: by the boundary it is staged in one, and voted on."""
PASSES = {BOUNDARY: 10, LOCKED: 4}
"""How often a moved byte is read or written in device memory, at most. By the boundary: summed in
its slot (three times, where parts of a slot are put together first), packed (twice), unpacked
(twice), summed, committed (twice); under a lock: written, summed in its slot."""


class Told:
    """A path that proposes what it is given: slots of this rank hand on their experts, in turn.

    Args:
        inner: the path; all but planning is its own.
        shape: how many of everything.
        slots: that change in a layer.
        path: its name.
    """

    def __init__(self, inner: Any, shape: Shape, slots: int, path: str) -> None:
        self._inner, self._shape, self._slots, self._path = inner, shape, slots, path
        self._turn = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def propose(self, load: Load, layout: Layout) -> Proposal:
        """The next layout, with its tables and its shipment."""
        self._turn += 1
        placement = handed_on(layout.placement, self._shape.slots_per_rank, self._slots, self._turn)
        after = Layout(placement, even_shares(placement, self._shape.experts))
        nothing = np.zeros(self._shape.layers, dtype=np.int64)
        drafted = Draft(after, tuple(range(self._shape.layers)), nothing, nothing)
        if self._path == LOCKED:
            return by_groups(drafted, self._shape, 1)
        made = by_ship(drafted, layout, self._shape, Freight(self._slots, 1, self._slots, 0))
        if made.shipment.travelling:
            raise RuntimeError("weights were to come from ranks that there are not")
        return made


def handed_on(placement: Placement, here: int, slots: int, turn: int) -> Placement:
    """Another placement: of rank 0 so many slots of every layer hold other experts of this rank.

    One slot alone is the last, which holds a second copy: it takes another each time. Several pass
    their experts round.
    """
    after = placement.copy()
    if slots == 1:
        after[:, here - 1] = placement[:, turn % (here - 1)]
        return after
    places = [(turn + place) % here for place in range(slots)]
    after[:, places] = placement[:, [*places[1:], places[0]]]
    return after
