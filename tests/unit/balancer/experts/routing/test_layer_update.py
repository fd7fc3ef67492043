import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.placement import (
    ExpertShape,
    Layout,
    Placement,
    initial_placement,
    solve_shares,
)
from equipoise.balancer.experts.routing.layer_update import LayerUpdate, layer_update
from equipoise.hal.routing import build_table

SHAPE = ExpertShape(layers=4, experts=4, slots=6, ranks=2)


def layout(seed: int) -> Layout:
    random = np.random.default_rng(seed)
    rows = [random.permutation(row) for row in initial_placement(SHAPE)]
    placement: Placement = np.stack(rows).astype(np.int32)
    load = random.integers(0, 100, (SHAPE.layers, SHAPE.experts))
    return Layout(placement, solve_shares(load, placement, SHAPE))


layouts = st.integers(0, 1000).map(layout)
layers = st.lists(st.integers(0, SHAPE.layers - 1), unique=True)


@given(layouts, layers)
def test_change_holds_tables_of_its_layers(new_layout: Layout, layer_ids: list[int]) -> None:
    change = layer_update(new_layout, SHAPE, layer_ids)
    assert change.layers == tuple(layer_ids)
    for position, layer in enumerate(layer_ids):
        placement = torch.from_numpy(new_layout.placement[layer])
        table = build_table(placement, torch.from_numpy(new_layout.shares[layer]), SHAPE.experts)
        assert torch.equal(change.tables.start[position], table.start)
        assert torch.equal(change.tables.replicas[position], table.replicas)
        assert torch.equal(change.tables.cumulative[position], table.cumulative)


@given(layouts, layouts, layers)
def test_change_applies_to_its_own_layers_only(
    before: Layout, new_layout: Layout, layer_ids: list[int]
) -> None:
    after = layer_update(new_layout, SHAPE, layer_ids).applied_to(before)
    for layer in range(SHAPE.layers):
        source = new_layout if layer in layer_ids else before
        assert (after.placement[layer] == source.placement[layer]).all()
        assert (after.shares[layer] == source.shares[layer]).all()


@pytest.mark.slow
@given(layouts, layouts, layers)
def test_change_digests_are_equal_only_for_equal_tables(
    one: Layout, other: Layout, layer_ids: list[int]
) -> None:
    first, second = layer_update(one, SHAPE, layer_ids), layer_update(other, SHAPE, layer_ids)
    same = all(
        torch.equal(getattr(first.tables, name), getattr(second.tables, name))
        for name in ("start", "replicas", "cumulative")
    )
    assert (first.digest == second.digest) == same
    assert first.digest == layer_update(one, SHAPE, layer_ids).digest


def test_change_digest_depends_on_layer_number() -> None:
    start = layout(0)
    rows = Layout(start.placement[[0, 0, 0, 0]], start.shares[[0, 0, 0, 0]])
    assert layer_update(rows, SHAPE, [0]).digest != layer_update(rows, SHAPE, [1]).digest


@given(layouts, layers, layers)
def test_change_where_placed_keeps_layers_with_same_placement(
    start: Layout, layer_ids: list[int], moved_layers: list[int]
) -> None:
    change = layer_update(start, SHAPE, layer_ids)
    placement = start.placement.copy()
    placement[moved_layers] = np.roll(placement[moved_layers], 1, axis=1)
    new_layout = Layout(placement, start.shares)
    unmoved_layers = [
        layer for layer in layer_ids if (placement[layer] == start.placement[layer]).all()
    ]
    restricted = change.restricted_to(new_layout)
    if not unmoved_layers and layer_ids:
        assert restricted is None
        return
    assert isinstance(restricted, LayerUpdate)
    assert restricted.layers == tuple(unmoved_layers)
    assert restricted.digest == layer_update(start, SHAPE, unmoved_layers).digest
