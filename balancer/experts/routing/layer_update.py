"""Builds routing tables from a layout, and the update of layers that a commit installs."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch

from equipoise import _native
from equipoise.balancer.experts.placement import ExpertShape, Layout, Placement, Shares
from equipoise.hal.kernels import TableUpdate


def table_update(layout: Layout, shape: ExpertShape, layers: Sequence[int]) -> TableUpdate:
    """Builds the routing tables of `layers`, on the host. Raises `ValueError` for a bad layout."""
    rows = list(layers)
    return build_tables(layout.placement[rows], layout.shares[rows], shape, rows)


def build_tables(
    placement: Placement, shares: Shares, shape: ExpertShape, layers: Sequence[int]
) -> TableUpdate:
    """Builds the routing tables from the rows of `layers` alone.

    Args:
        placement: int32 (len(layers), slots).
        shares: int32 (len(layers), slots).
        shape: numbers of layers, experts, slots and ranks.
        layers: the layers of the rows.

    Raises `ValueError` for a malformed layout.
    """
    start = np.empty((len(layers), shape.experts + 1), dtype=np.int32)
    replicas, cumulative = np.empty((2, len(layers), shape.slots), dtype=np.int32)
    _native.build_tables(placement, shares, shape.experts, start, replicas, cumulative)
    return TableUpdate(
        layers=tuple(layers),
        start=torch.from_numpy(start),
        replicas=torch.from_numpy(replicas),
        cumulative=torch.from_numpy(cumulative),
    )


def table_digests(update: TableUpdate) -> tuple[int, ...]:
    """Returns a digest of each layer, below 2**64, equal if the tables are.

    It is `equipoise.hal.checksum` of the bytes of start, replicas and cumulative.
    """
    parts = (update.start.numpy(), update.replicas.numpy(), update.cumulative.numpy())
    return tuple(_native.digest_tables(*parts).tolist())


@dataclass(frozen=True)
class LayerUpdate:
    """A new layout of some layers, with its tables: built on a worker, then committed.

    Attributes:
        placement: int32 (len(layers), slots).
        shares: int32 (len(layers), slots).
        tables: their routing tables, on the host, with the numbers of the layers.
    """

    placement: Placement
    shares: Shares
    tables: TableUpdate

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that change."""
        return self.tables.layers

    @property
    def digest(self) -> str:
        """Digest, equal on two ranks exactly if the tables are."""
        words = np.array([*self.layers, *table_digests(self.tables)], dtype="<u8")
        return blake2b(words.tobytes(), digest_size=16).hexdigest()

    def trace_fields(self) -> dict[str, object]:
        """Returns its layers."""
        return {"layers": list(self.layers)}

    def applied_to(self, layout: Layout) -> Layout:
        """Returns `layout` with these layers changed."""
        placement, shares = layout.placement.copy(), layout.shares.copy()
        for row, layer in enumerate(
            self.layers
        ):  # mostly one layer: faster than indexing by a list
            placement[layer] = self.placement[row]
            shares[layer] = self.shares[row]
        return Layout(placement, shares)

    def restricted_to(self, layout: Layout) -> "LayerUpdate | None":
        """Returns the part whose layers are placed as in `layout`, or None."""
        fits = (self.placement == layout.placement[list(self.layers)]).all(axis=1)
        if fits.all():
            return self
        positions = np.flatnonzero(fits)
        if not positions.size:
            return None
        rows, old = torch.from_numpy(positions), self.tables
        update = TableUpdate(
            layers=tuple(old.layers[row] for row in positions.tolist()),
            start=old.start[rows],
            replicas=old.replicas[rows],
            cumulative=old.cumulative[rows],
        )
        return LayerUpdate(self.placement[positions], self.shares[positions], update)


def layer_update(layout: Layout, shape: ExpertShape, layers: Sequence[int]) -> LayerUpdate:
    """Builds the update of `layers` to `layout`. Raises as `table_update` does."""
    rows = list(layers)
    placement, shares = layout.placement[rows], layout.shares[rows]
    return LayerUpdate(placement, shares, build_tables(placement, shares, shape, rows))
