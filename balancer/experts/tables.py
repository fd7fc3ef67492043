"""From a layout to the tables that the routing kernel reads."""

from collections.abc import Sequence

import torch

from equipoise import _native
from equipoise.balancer.experts.aliases import Alias, aliases
from equipoise.balancer.experts.layout import Layout
from equipoise.balancer.experts.placement import Shape
from equipoise.hal.kernels import TableUpdate


def table_update(layout: Layout, shape: Shape, layers: Sequence[int]) -> TableUpdate:
    """Routing tables of `layers`, on the host, by which no token reaches a retired slot.

    Raises `ValueError` for a malformed layout, `PlacementError` where an expert has no other slot.
    """
    retired = layout.retired_in(layers)
    alias = aliases(layout.placement, retired, shape) if retired else None
    return aliased_update(layout, shape, layers, alias)


def aliased_update(
    layout: Layout, shape: Shape, layers: Sequence[int], alias: Alias | None
) -> TableUpdate:
    """As `table_update`; the entry of slot s names slot `alias[layer, s]`, of the same expert.

    Raises `ValueError` for a malformed layout, or for an alias of another expert.
    """
    rows = list(layers)
    update = TableUpdate(
        layers=tuple(rows),
        start=torch.empty((len(rows), shape.experts + 1), dtype=torch.int32),
        replicas=torch.empty((len(rows), shape.slots), dtype=torch.int32),
        cumulative=torch.empty((len(rows), shape.slots), dtype=torch.int32),
    )
    _native.build_tables(
        layout.placement[rows],
        layout.shares[rows],
        shape.experts,
        update.start.numpy(),
        update.replicas.numpy(),
        update.cumulative.numpy(),
        None if alias is None else alias[rows],
    )
    return update


def table_digests(update: TableUpdate) -> tuple[int, ...]:
    """Of each of its layers a fingerprint below 2**64; equal where the tables are.

    It is `equipoise.hal.checksum` of the bytes of start, replicas and cumulative.
    """
    parts = (update.start.numpy(), update.replicas.numpy(), update.cumulative.numpy())
    return tuple(_native.digest_tables(*parts).tolist())
