"""Properties of replay's model of vllm-ascend: placements, parts, dispatch and refusals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.placement import ExpertShape, Load, Placement, check_placement
from equipoise.hal.errors import PlacementError
from equipoise.report.replay.engine_model import WindowLoad
from equipoise.report.replay.engines.vllm_ascend import (
    DefaultPolicy,
    ReplicaByRank,
    SwiftPolicy,
    vllm_ascend_model,
)

VLLM_ASCEND = vllm_ascend_model(layers=3)
SHAPE = ExpertShape(layers=3, experts=16, slots=20, ranks=4)


@st.composite
def shapes(draw: st.DrawFn) -> ExpertShape:
    """With at most one redundant slot per rank, as its policies are made for."""
    ranks, size = draw(st.integers(1, 6)), draw(st.integers(2, 6))
    redundant = draw(st.integers(0, ranks if ranks > 1 else 0))
    return ExpertShape(draw(st.integers(1, 3)), ranks * size - redundant, ranks * size, ranks)


def window_of(rows: Load, placement: Placement, shape: ExpertShape) -> WindowLoad:
    """Rows by expert, as the engine's dispatch divides them."""
    parts = ReplicaByRank().parts(placement, shape)
    by_slot = np.take_along_axis(rows, placement.astype(np.int64), axis=1) * parts
    return WindowLoad(rows, by_slot.astype(np.int64), steps=1)


def drawn_rows(seed: int, shape: ExpertShape) -> Load:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 10, (shape.layers, shape.experts)) ** 3 * 60


def fullest(rows: Load, placement: Placement, shape: ExpertShape) -> float:
    """Rows of each layer's fullest rank under an even split, summed."""
    replicas = np.stack([np.bincount(row, minlength=shape.experts) for row in placement])
    by_slot = np.take_along_axis(rows / replicas, placement.astype(np.int64), axis=1)
    return float(by_slot.reshape(shape.layers, shape.ranks, -1).sum(axis=2).max(axis=1).sum())


@given(shapes(), st.integers(0, 99))
def test_swift_plans_place_every_expert_once_per_rank(shape: ExpertShape, seed: int) -> None:
    placement = VLLM_ASCEND.initial(shape)
    for turn in range(3):
        check_placement(placement, shape)
        by_rank = np.sort(placement.reshape(shape.layers, shape.ranks, -1), axis=2)
        assert (np.diff(by_rank, axis=2) > 0).all()
        load = window_of(drawn_rows(seed + turn, shape), placement, shape)
        placement = SwiftPolicy()(load, placement, shape)


@pytest.mark.parametrize("policy", [SwiftPolicy(), DefaultPolicy()], ids=["swift", "default_eplb"])
def test_vllm_ascend_plans_lower_fullest_rank(policy: SwiftPolicy | DefaultPolicy) -> None:
    rows = drawn_rows(1, SHAPE)
    before = VLLM_ASCEND.initial(SHAPE)
    after = policy(window_of(rows, before, SHAPE), before, SHAPE)
    check_placement(after, SHAPE)
    assert fullest(rows, after, SHAPE) < 0.9 * fullest(rows, before, SHAPE)


@pytest.mark.parametrize("rows", [0, 240])
def test_swift_leaves_even_layers_as_they_are(rows: int) -> None:
    shape = ExpertShape(layers=2, experts=16, slots=16, ranks=4)
    placement = VLLM_ASCEND.initial(shape)
    load = WindowLoad(*(np.full((2, 16), rows, dtype=np.int64),) * 2, steps=1)
    np.testing.assert_array_equal(SwiftPolicy()(load, placement, shape), placement)


def test_swift_changes_no_layer_if_first_has_no_rows() -> None:
    placement = VLLM_ASCEND.initial(SHAPE)
    rows = drawn_rows(1, SHAPE)
    rows[0] = 0
    planned = SwiftPolicy()(window_of(rows, placement, SHAPE), placement, SHAPE)
    np.testing.assert_array_equal(planned, placement)


def test_default_policy_refuses_more_redundant_slots_than_ranks() -> None:
    shape = ExpertShape(layers=1, experts=7, slots=12, ranks=4)
    placement = VLLM_ASCEND.initial(shape)
    load = window_of(drawn_rows(0, shape), placement, shape)
    with pytest.raises(PlacementError, match="at most one redundant slot per rank, got 5 on 4"):
        DefaultPolicy()(load, placement, shape)


def test_default_policy_refuses_load_that_leaves_no_rank_for_an_expert() -> None:
    """By then the only rank with room has another replica of it."""
    shape = ExpertShape(layers=1, experts=3, slots=6, ranks=3)
    placement = VLLM_ASCEND.initial(shape)
    load = window_of(np.array([[120, 60, 60]]), placement, shape)
    with pytest.raises(PlacementError, match="finds no rank for expert 0 of layer 0"):
        DefaultPolicy()(load, placement, shape)


@pytest.mark.parametrize("policy", [SwiftPolicy(), DefaultPolicy()], ids=["swift", "default_eplb"])
def test_vllm_ascend_refuses_expert_twice_on_a_rank(policy: SwiftPolicy | DefaultPolicy) -> None:
    shape = ExpertShape(layers=1, experts=3, slots=4, ranks=2)
    placement = np.array([[0, 1, 2, 2]], dtype=np.int32)
    load = WindowLoad(np.ones((1, 3), dtype=np.int64), np.ones((1, 4), dtype=np.int64), steps=1)
    with pytest.raises(PlacementError, match="twice on a rank, as rank 1 of layer 0 does"):
        policy(load, placement, shape)


def test_vllm_ascend_initial_placement_refuses_fewer_experts_than_it_names() -> None:
    with pytest.raises(PlacementError, match="2 experts on 4 ranks: it would place expert 2"):
        VLLM_ASCEND.initial(ExpertShape(1, 2, 4, 4))


def test_vllm_ascend_initial_placement_refuses_more_slots_than_a_rank_can_use() -> None:
    with pytest.raises(PlacementError, match="twice on a rank"):
        VLLM_ASCEND.initial(ExpertShape(1, 3, 8, 2))


@given(shapes(), st.integers(1, 4), st.integers(0, 99))
def test_vllm_ascend_rows_of_equal_sources_divide_as_parts_say(
    shape: ExpertShape, tp_size: int, seed: int
) -> None:
    """Each rank sends one row of every expert and one of none."""
    rule = ReplicaByRank(tp_size=tp_size)
    placement = VLLM_ASCEND.initial(shape)
    load = window_of(drawn_rows(seed, shape), placement, shape)
    placement = SwiftPolicy()(load, placement, shape)
    layer = seed % shape.layers
    ids = np.tile(np.arange(-1, shape.experts, dtype=np.int32), (shape.ranks, 1))
    sources = np.arange(shape.ranks, dtype=np.int32)
    slots = rule.route(ids, sources, placement, shape, layer, step=0)
    assert (slots[:, 0] == -1).all()
    np.testing.assert_array_equal(placement[layer, slots[:, 1:]], ids[:, 1:])
    counts = np.bincount(slots[:, 1:].ravel(), minlength=shape.slots)
    parts = rule.parts(placement, shape)
    np.testing.assert_allclose(parts[layer] * shape.ranks, counts, rtol=1e-6)
    sums = np.zeros((shape.layers, shape.experts))
    np.add.at(sums, (np.arange(shape.layers)[:, None], placement), parts)
    np.testing.assert_allclose(sums, 1, rtol=1e-6)
