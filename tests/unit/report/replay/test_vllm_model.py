"""Properties of replay's model of vLLM: placements, parts and dispatch."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from equipoise.balancer.experts.placement import ExpertShape, Placement, check_placement
from equipoise.hal.errors import PlacementError
from equipoise.report.replay.engine_model import EngineModel, WindowLoad
from equipoise.report.replay.engines import eplb_policy
from equipoise.report.replay.engines.vllm import VLLM, DefaultPolicy, keep_slots
from equipoise.report.replay.engines.vllm_ascend import vllm_ascend_model

RULE = VLLM.rules[0]
SHAPE = ExpertShape(layers=3, experts=16, slots=24, ranks=4)


@st.composite
def shapes(draw: st.DrawFn) -> ExpertShape:
    ranks, size = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    experts = draw(st.integers(1, ranks * size))
    return ExpertShape(draw(st.integers(1, 3)), experts, ranks * size, ranks)


def window_of(seed: int, shape: ExpertShape) -> WindowLoad:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 10, (shape.layers, shape.experts)) ** 3
    return WindowLoad(rows, np.zeros((shape.layers, shape.slots), dtype=np.int64), steps=1)


def parts_by_expert(placement: Placement, shape: ExpertShape) -> NDArray[np.float64]:
    sums = np.zeros((shape.layers, shape.experts))
    np.add.at(sums, (np.arange(shape.layers)[:, None], placement), RULE.parts(placement, shape))
    return sums


@given(shapes(), st.integers(0, 99))
def test_vllm_plans_place_every_expert_and_parts_sum_to_one(shape: ExpertShape, seed: int) -> None:
    placement = VLLM.initial(shape)
    for _ in range(2):
        check_placement(placement, shape)
        np.testing.assert_allclose(parts_by_expert(placement, shape), 1, rtol=1e-6)
        placement = VLLM.planner(window_of(seed, shape), placement, shape)


@given(shapes(), st.integers(0, 99))
def test_vllm_plan_of_same_load_moves_nothing(shape: ExpertShape, seed: int) -> None:
    load = window_of(seed, shape)
    planned = VLLM.planner(load, VLLM.initial(shape), shape)
    np.testing.assert_array_equal(VLLM.planner(load, planned, shape), planned)


def test_vllm_plan_keeps_groups_of_experts_on_nodes() -> None:
    shape = replace(SHAPE, ranks=8)
    planned = DefaultPolicy(groups=4, nodes=2)(window_of(0, shape), VLLM.initial(shape), shape)
    for layer in planned.reshape(shape.layers, 2, -1):
        first, second = (set((node // 4).tolist()) for node in layer)
        assert len(first) == len(second) == 2
        assert not first & second


def test_vllm_plan_refuses_groups_that_do_not_divide_experts() -> None:
    with pytest.raises(PlacementError, match="16 experts do not divide into 3 groups"):
        DefaultPolicy(groups=3)(window_of(0, SHAPE), VLLM.initial(SHAPE), SHAPE)


def test_vllm_initial_placement_refuses_more_slots_than_maps_hold() -> None:
    with pytest.raises(PlacementError, match="at most 1023 redundant slots, got 1024"):
        VLLM.initial(ExpertShape(1, 8, 1032, 8))


def test_keep_slots_leaves_experts_that_stay_in_their_slots() -> None:
    shape = ExpertShape(layers=1, experts=6, slots=6, ranks=2)
    installed = np.array([[0, 1, 2, 3, 4, 5]], dtype=np.int32)
    planned = np.array([[5, 2, 0, 4, 1, 3]], dtype=np.int32)
    assert keep_slots(installed, planned, shape).tolist() == [[0, 5, 2, 3, 4, 1]]


@given(shapes(), st.integers(0, 99))
def test_vllm_rows_go_to_slots_of_their_expert_and_none_stays_none(
    shape: ExpertShape, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    placement = VLLM.initial(shape)
    ids = rng.integers(-1, shape.experts, (rng.integers(0, 40), 3)).astype(np.int32)
    sources = np.sort(rng.integers(0, shape.ranks, len(ids))).astype(np.int32)
    slots = RULE.route(ids, sources, placement, shape, layer=0, step=seed)
    expected = np.where(ids < 0, -1, ids)
    np.testing.assert_array_equal(np.where(slots < 0, -1, placement[0, slots]), expected)


def test_vllm_rows_of_an_expert_divide_as_parts_say() -> None:
    placement = VLLM.initial(SHAPE)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, SHAPE.experts, (40_000, 1)).astype(np.int32)
    sources = np.repeat(np.arange(4, dtype=np.int32), 10_000)
    slots = RULE.route(ids, sources, placement, SHAPE, layer=2, step=0)
    rows = np.bincount(ids.ravel(), minlength=SHAPE.experts)[placement[2]]
    expected = RULE.parts(placement, SHAPE)[2] * rows
    counts = np.bincount(slots.ravel(), minlength=SHAPE.slots)
    np.testing.assert_allclose(counts, expected, atol=5 * np.sqrt(rows.max()))


def test_vllm_rows_are_hashed_by_their_place_in_each_rank() -> None:
    """So equal batches of two ranks are routed alike, and their first row to the first replica."""
    placement = VLLM.initial(SHAPE)
    ids = np.tile(np.arange(10, dtype=np.int32)[:, None] // 2 % 2, (2, 1))
    sources = np.repeat(np.arange(2, dtype=np.int32), 10)
    slots = RULE.route(ids, sources, placement, SHAPE, layer=0, step=0)
    np.testing.assert_array_equal(slots[:10], slots[10:])
    assert slots[:4].ravel().tolist() == [0, 16, 1, 17]


@given(st.integers(0, 99), st.sampled_from([VLLM, vllm_ascend_model(SHAPE.layers)]))
def test_eplb_policy_plans_from_what_is_installed(seed: int, model: EngineModel) -> None:
    """Every expert has a slot, no rank is fuller, and the same load moves nothing again."""
    planner = model.policies[eplb_policy.NAME]
    load, installed = window_of(seed, SHAPE), model.initial(SHAPE)
    placement = planner(load, installed, SHAPE)
    check_placement(placement, SHAPE)
    assert (
        rows_of_fullest_rank(placement, load) <= rows_of_fullest_rank(installed, load) * (1 + 1e-6)
    ).all()
    assert planner(load, placement, SHAPE).tolist() == placement.tolist()


def rows_of_fullest_rank(placement: Placement, load: WindowLoad) -> NDArray[np.float64]:
    rows = np.take_along_axis(load.experts, placement, axis=1) * RULE.parts(placement, SHAPE)
    ranks: NDArray[np.float64] = rows.reshape(SHAPE.layers, SHAPE.ranks, -1).sum(axis=2)
    return np.asarray(ranks.max(axis=1), dtype=np.float64)
