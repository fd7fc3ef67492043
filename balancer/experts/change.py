"""Another layout for some layers, ready to be installed."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch

from equipoise.balancer.experts.layout import Layout, Retired
from equipoise.balancer.experts.placement import Placement, Shape, Shares
from equipoise.balancer.experts.tables import alias_of, rows_update, table_digests
from equipoise.hal.kernels import TableUpdate


@dataclass(frozen=True)
class Change:
    """Another layout for some layers, with its tables: made beside the forward, then installed.

    Attributes:
        placement: int32 (len(layers), slots).
        shares: int32 (len(layers), slots).
        update: their tables, on the host; says which layers.
        retired: slots of these layers that are retired with it; no others of them are.
    """

    placement: Placement
    shares: Shares
    update: TableUpdate
    retired: Retired = frozenset()

    @property
    def layers(self) -> tuple[int, ...]:
        """Which layers change."""
        return self.update.layers

    @property
    def digest(self) -> str:
        """Equal on two ranks exactly when the tables are."""
        words = np.array([*self.layers, *table_digests(self.update)], dtype="<u8")
        return blake2b(words.tobytes(), digest_size=16).hexdigest()

    def on(self, layout: Layout) -> Layout:
        """The layout with these layers changed."""
        placement, shares = layout.placement.copy(), layout.shares.copy()
        for row, layer in enumerate(self.layers):  # mostly one: quicker than by a list
            placement[layer] = self.placement[row]
            shares[layer] = self.shares[row]
        if not layout.retired and not self.retired:
            return Layout(placement, shares)
        stay = layout.retired - layout.retired_in(self.layers)
        return Layout(placement, shares, stay | self.retired)

    def where_placed(self, layout: Layout) -> "Change | None":
        """The part for layers placed as in `layout`, and retired alike; None where there is none.

        So what was made before slots have retired does not let tokens in again.
        """
        fits = (self.placement == layout.placement[list(self.layers)]).all(axis=1)
        moved = {layer for layer, _ in self.retired ^ layout.retired_in(self.layers)}
        fits[[place for place, layer in enumerate(self.layers) if layer in moved]] = False
        if fits.all():
            return self
        kept = np.flatnonzero(fits)
        if not kept.size:
            return None
        rows, old = torch.from_numpy(kept), self.update
        update = TableUpdate(
            layers=tuple(old.layers[row] for row in kept.tolist()),
            start=old.start[rows],
            replicas=old.replicas[rows],
            cumulative=old.cumulative[rows],
        )
        still = frozenset(place for place in self.retired if place[0] in update.layers)
        return Change(self.placement[kept], self.shares[kept], update, still)


def change_of(layout: Layout, shape: Shape, layers: Sequence[int]) -> Change:
    """The change that brings `layers` to what `layout` says. Raises as `table_update` does."""
    rows = list(layers)
    placement, shares = layout.placement[rows], layout.shares[rows]
    update = rows_update(placement, shares, shape, rows, alias_of(layout, shape, rows))
    return Change(placement, shares, update, layout.retired_in(rows))
