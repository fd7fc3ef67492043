"""From a layout to tables of the layers that change."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.layout import Layout, solve_shares
from equipoise.balancer.experts.placement import Shape
from equipoise.balancer.experts.tables import rows_update, table_digests, table_update
from equipoise.hal import routing
from equipoise.hal.kernels import TableUpdate

SHAPE = Shape(layers=4, experts=3, slots=6, ranks=2)


def layout() -> Layout:
    rows = [[0, 1, 2, 0, 1, 2], [2, 1, 0, 0, 0, 1], [0, 0, 0, 0, 1, 2], [1, 2, 2, 2, 2, 0]]
    placement = np.array(rows, dtype=np.int32)
    load = np.array([[9, 4, 1], [30, 2, 2], [7, 7, 7], [1, 2, 3]], dtype=np.int64)
    return Layout(placement, solve_shares(load, placement, SHAPE))


@given(st.lists(st.integers(0, SHAPE.layers - 1), unique=True))
def test_an_update_has_the_tables_of_the_layers_asked_for_in_their_order(
    layers: list[int],
) -> None:
    made, update = layout(), table_update(layout(), SHAPE, layers)
    assert update.layers == tuple(layers)
    for place, layer in enumerate(layers):
        held, shares = (
            torch.from_numpy(part[layer].copy()) for part in (made.placement, made.shares)
        )
        due = routing.build_table(held, shares, SHAPE.experts)
        assert update.start[place].tolist() == due.start.tolist()
        assert update.replicas[place].tolist() == due.replicas.tolist()
        assert update.cumulative[place].tolist() == due.cumulative.tolist()


def test_an_alias_belongs_to_its_layer() -> None:
    alias = np.tile(np.arange(SHAPE.slots, dtype=np.int32), (2, 1))
    alias[1, 3] = 1
    made, plain = layout(), table_update(layout(), SHAPE, [1, 2])
    update = rows_update(made.placement[1:3], made.shares[1:3], SHAPE, [1, 2], alias)
    assert torch.equal(update.replicas[0], plain.replicas[0])
    assert update.replicas[1].tolist() == [0, 1, 1, 2, 4, 5]


def test_digests_tell_tables_apart_layer_by_layer() -> None:
    update = table_update(layout(), SHAPE, range(SHAPE.layers))
    digests = table_digests(update)
    assert len(set(digests)) == SHAPE.layers
    for name in ("start", "replicas", "cumulative"):
        parts = {p: getattr(update, p).clone() for p in ("start", "replicas", "cumulative")}
        parts[name][2, -1] += 1
        other = table_digests(TableUpdate(update.layers, **parts))
        assert [a == b for a, b in zip(digests, other, strict=True)] == [True, True, False, True]


def test_a_malformed_layout_is_refused() -> None:
    broken = layout()
    broken.shares[3, 0] -= 1
    with pytest.raises(ValueError, match=r"sum of 65536 .* expert 1 of row 0"):
        table_update(broken, SHAPE, [3])
