"""From a layout to the tables that the routing kernel reads."""

from collections.abc import Sequence

import numpy as np
import torch

from equipoise import _native
from equipoise.balancer.experts.layout import Layout
from equipoise.balancer.experts.placement import Placement, Shape, Shares
from equipoise.hal.kernels import TableUpdate


def table_update(layout: Layout, shape: Shape, layers: Sequence[int]) -> TableUpdate:
    """Routing tables of `layers`, on the host. Raises `ValueError` for a malformed layout."""
    rows = list(layers)
    return rows_update(layout.placement[rows], layout.shares[rows], shape, rows)


def rows_update(
    placement: Placement, shares: Shares, shape: Shape, layers: Sequence[int]
) -> TableUpdate:
    """The same from the rows of `layers` alone.

    Args:
        placement: int32 (len(layers), slots).
        shares: likewise.
        shape: how many of everything.
        layers: which they are.

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
    """Of each of its layers a fingerprint below 2**64; equal where the tables are.

    It is `equipoise.hal.checksum` of the bytes of start, replicas and cumulative.
    """
    parts = (update.start.numpy(), update.replicas.numpy(), update.cumulative.numpy())
    return tuple(_native.digest_tables(*parts).tolist())
