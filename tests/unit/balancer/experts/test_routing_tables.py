"""From a layout to tables of the layers that change."""

import numpy as np
import torch

from equipoise.balancer.experts.layout import Layout, solve_shares
from equipoise.balancer.experts.placement import Shape
from equipoise.balancer.experts.tables import rows_update, table_update

SHAPE = Shape(layers=4, experts=3, slots=6, ranks=2)


def layout() -> Layout:
    rows = [[0, 1, 2, 0, 1, 2], [2, 1, 0, 0, 0, 1], [0, 0, 0, 0, 1, 2], [1, 2, 2, 2, 2, 0]]
    placement = np.array(rows, dtype=np.int32)
    load = np.array([[9, 4, 1], [30, 2, 2], [7, 7, 7], [1, 2, 3]], dtype=np.int64)
    return Layout(placement, solve_shares(load, placement, SHAPE))


def test_rows_update_applies_alias_to_its_layer_only() -> None:
    alias = np.tile(np.arange(SHAPE.slots, dtype=np.int32), (2, 1))
    alias[1, 3] = 1
    made, plain = layout(), table_update(layout(), SHAPE, [1, 2])
    update = rows_update(made.placement[1:3], made.shares[1:3], SHAPE, [1, 2], alias)
    assert torch.equal(update.replicas[0], plain.replicas[0])
    assert update.replicas[1].tolist() == [0, 1, 1, 2, 4, 5]
