"""From a layout to the tables that the routing kernel reads."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from equipoise import _native
from equipoise.balancer.experts.layout import Layout
from equipoise.balancer.experts.placement import Shape
from equipoise.hal.kernels import TableUpdate

Alias = npt.NDArray[np.int32]
"""(layers, slots): the slot that an entry of the table names: another one where a slot retires."""


def table_update(layout: Layout, shape: Shape, layers: Sequence[int]) -> TableUpdate:
    """Routing tables of `layers`, on the host. Raises `ValueError` for a malformed layout."""
    return _update(layout, shape, layers, None)


def aliased_update(
    layout: Layout, shape: Shape, layers: Sequence[int], alias: Alias
) -> TableUpdate:
    """As `table_update`; the entry of slot s names slot `alias[layer, s]`, of the same expert.

    Raises `ValueError` for a malformed layout, or for an alias of another expert.
    """
    return _update(layout, shape, layers, alias[list(layers)])


def table_digests(update: TableUpdate) -> tuple[int, ...]:
    """Of each of its layers a fingerprint below 2**64; equal where the tables are.

    It is `equipoise.hal.checksum` of the bytes of start, replicas and cumulative.
    """
    parts = (update.start.numpy(), update.replicas.numpy(), update.cumulative.numpy())
    return tuple(_native.digest_tables(*parts).tolist())


def _update(
    layout: Layout, shape: Shape, layers: Sequence[int], alias: Alias | None
) -> TableUpdate:
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
        alias,
    )
    return update
