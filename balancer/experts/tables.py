"""From a layout to the tables that the routing kernel reads."""

from collections.abc import Sequence

import torch

from equipoise import _native
from equipoise.balancer.experts.placement import Shape
from equipoise.balancer.experts.planner import Layout
from equipoise.hal.kernels import TableUpdate


def table_update(layout: Layout, shape: Shape, layers: Sequence[int]) -> TableUpdate:
    """Routing tables of `layers`, on the host. Raises `ValueError` for a malformed layout."""
    update = TableUpdate(
        layers=tuple(layers),
        start=torch.empty((len(layers), shape.experts + 1), dtype=torch.int32),
        replicas=torch.empty((len(layers), shape.slots), dtype=torch.int32),
        cumulative=torch.empty((len(layers), shape.slots), dtype=torch.int32),
    )
    for place, layer in enumerate(layers):
        _native.build_table(
            layout.placement[layer],
            layout.shares[layer],
            shape.experts,
            update.start[place].numpy(),
            update.replicas[place].numpy(),
            update.cumulative[place].numpy(),
        )
    return update
