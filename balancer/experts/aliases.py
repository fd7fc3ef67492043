"""Which slot takes the tokens of one that is retired.

A retired slot keeps its entry in the routing table, but the entry names another slot of the same
expert, its *alias*. So the runs keep their lengths, the alias stands twice in its run and takes the
share of both, and every share mode leaves the retired slot alone: `exact` too, which solves shares
of its own for whatever slots the table names.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.placement import Placement, Shape
from equipoise.hal.errors import PlacementError

Alias = npt.NDArray[np.int32]
"""(layers, slots): the slot that an entry of the table names: another where a slot has retired."""


def aliases(placement: Placement, retired: Iterable[tuple[int, int]], shape: Shape) -> Alias:
    """The alias of every slot, int32 (layers, slots); of one that stays, itself.

    It is a slot of the same expert that stays: on the same rank where there is one, then the one
    that has fewest aliases so far, then the lowest. Slots retire in ascending order, so that all
    ranks find the same.

    Raises:
        PlacementError: an expert would be left without a slot, or there is no such slot.
    """
    found = np.tile(np.arange(shape.slots, dtype=np.int32), (shape.layers, 1))
    by_layer: dict[int, set[int]] = {}
    for layer, slot in retired:
        if not (0 <= layer < shape.layers and 0 <= slot < shape.slots):
            raise PlacementError(f"layer {layer} has no slot {slot} that could retire")
        by_layer.setdefault(layer, set()).add(slot)
    for layer, slots in by_layer.items():
        _alias(layer, placement[layer].tolist(), slots, shape, found[layer])
    return found


def _alias(layer: int, held: list[int], slots: set[int], shape: Shape, found: Alias) -> None:
    """Write the aliases of one layer's retired `slots` into its row of `found`."""
    staying: dict[int, list[int]] = {}
    for slot, expert in enumerate(held):
        if slot not in slots:
            staying.setdefault(expert, []).append(slot)
    taken: Counter[int] = Counter()
    for slot in sorted(slots):
        if held[slot] not in staying:
            raise PlacementError(
                f"layer {layer}: no slot of expert {held[slot]} stays when slot {slot} retires"
            )
        rank = slot // shape.slots_per_rank
        alias = min(
            staying[held[slot]],
            key=lambda other: (other // shape.slots_per_rank != rank, taken[other], other),
        )
        taken[alias] += 1
        found[slot] = alias
