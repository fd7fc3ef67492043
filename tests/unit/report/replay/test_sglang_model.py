"""The model of SGLang's balancer; tests/engines/sglang compares it with SGLang's own functions."""

import numpy as np
import pytest
from helpers.strategies.replay_cases import (
    ReplayCase,
    drawn_placement,
    one_row_each,
    part_of_expert,
    replay_cases,
    window,
)
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.placement import ExpertShape, Placement, check_placement
from equipoise.hal.errors import PlacementError
from equipoise.report.replay.engine_model import DispatchRule, EngineModel, SplitKind
from equipoise.report.replay.engines.sglang import (
    SGLANG,
    DeepseekPlanner,
    ExpertLocations,
    LpDispatch,
    sglang_model,
)

SHAPE = ExpertShape(2, 8, 16, 4)


def placements(model: EngineModel, case: ReplayCase) -> tuple[Placement, Placement]:
    """One that the model planned, and one that it was started with."""
    planned = model.planner(window(case.load, case.shape), case.placement, case.shape)
    return planned, case.placement


def rule(name: str, model: EngineModel = SGLANG) -> DispatchRule:
    """The rule of that name."""
    return next(each for each in model.rules if each.name == name)


@given(case=replay_cases())
def test_sglang_plan_places_every_expert(case: ReplayCase) -> None:
    planned, _ = placements(sglang_model(), case)
    check_placement(planned, case.shape)
    assert planned.dtype == np.int32


@given(case=replay_cases(), name=st.sampled_from(["static", "dynamic", "dynamic_rank_invariant"]))
def test_sglang_parts_sum_to_one_for_every_expert(case: ReplayCase, name: str) -> None:
    model = sglang_model()
    for placement in placements(model, case):
        parts = rule(name, model).parts(placement, case.shape)
        assert parts.dtype == np.float32
        sums = part_of_expert(parts, placement, case.shape)
        np.testing.assert_allclose(sums, 1, rtol=1e-5)


@given(case=replay_cases(), number=st.integers(0, len(SGLANG.rules) - 1))
def test_sglang_rows_go_to_a_slot_of_their_expert_and_none_stays_none(
    case: ReplayCase, number: int
) -> None:
    model = sglang_model()
    for placement in placements(model, case):
        for layer in range(case.shape.layers):
            routed = model.rules[number].route(
                case.ids, case.sources, placement, case.shape, layer, step=3
            )
            assert routed.dtype == np.int32
            held = np.where(routed >= 0, placement[layer][routed], -1)
            np.testing.assert_array_equal(held, case.ids)


@given(case=replay_cases())
def test_sglang_static_parts_are_the_rows_of_equal_ranks(case: ReplayCase) -> None:
    model = sglang_model()
    ids, sources = one_row_each(case.shape)
    for placement in placements(model, case):
        parts = rule("static", model).parts(placement, case.shape)
        for layer in range(case.shape.layers):
            slots = rule("static", model).route(ids, sources, placement, case.shape, layer, step=0)
            rows = np.bincount(slots.reshape(-1), minlength=case.shape.slots)
            np.testing.assert_allclose(rows / case.shape.ranks, parts[layer], rtol=1e-6)


@pytest.mark.parametrize("origin", ["planned", "started with"])
@pytest.mark.parametrize("name", ["dynamic", "dynamic_rank_invariant"])
def test_sglang_rows_of_dynamic_dispatch_come_to_its_parts(name: str, origin: str) -> None:
    """Seeds are fixed; the bound is five standard deviations of a draw."""
    model = sglang_model()
    rng = np.random.default_rng(1)
    ids, sources = one_row_each(SHAPE, copies=2000)
    load = rng.integers(1, 99, (2, 8))
    case = ReplayCase(SHAPE, load, drawn_placement(SHAPE, rng), ids, sources)
    placement = placements(model, case)[origin != "planned"]
    order = rng.permutation(len(ids))
    slots = rule(name, model).route(ids[order], sources[order], placement, SHAPE, 1, step=9)
    rows = np.bincount(slots.reshape(-1), minlength=SHAPE.slots) / (2000 * SHAPE.ranks)
    parts = rule(name, model).parts(placement, SHAPE)[1]
    np.testing.assert_allclose(rows, parts, atol=5 * 0.5 / np.sqrt(2000 * SHAPE.ranks))


def test_sglang_dynamic_draws_anew_in_each_step_and_layer() -> None:
    """Of the replicas on another rank: of its own, a rank would use the first."""
    placement = np.tile(np.array([0, 0, 0, 0, 1, 1, 1, 1], dtype=np.int32), (2, 1))
    shape = ExpertShape(2, 2, 8, 2)
    ids, sources = np.zeros((64, 1), dtype=np.int32), np.ones(64, dtype=np.int32)
    first, again, *others = (
        rule("dynamic").route(ids, sources, placement, shape, layer, step).tolist()
        for layer, step in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert first == again
    assert first not in others


def test_sglang_dynamic_has_the_odds_of_a_remainder() -> None:
    """65,536 is no multiple of three: the first replica is drawn once more often."""
    model = sglang_model()
    shape = ExpertShape(1, 1, 3, 3)
    load = np.ones((1, 1), dtype=np.int64)
    planned = model.planner(window(load, shape), np.zeros((1, 3), dtype=np.int32), shape)
    found = rule("dynamic", model).parts(planned, shape)[0]
    np.testing.assert_array_equal(found, np.array([21846, 21845, 21845], np.float32) / 65536)


def test_sglang_ranks_keep_to_their_own_replica_only_of_what_they_start_with() -> None:
    model = sglang_model()
    shape = ExpertShape(1, 2, 4, 2)
    started = np.array([[0, 1, 1, 0]], dtype=np.int32)
    ids, sources = one_row_each(shape, copies=50)
    for name in ("static", "dynamic", "lp"):
        slots = rule(name, model).route(ids, sources, started, shape, 0, step=0)
        np.testing.assert_array_equal(slots[:, 0] // 2, sources)
    planned = model.planner(window(np.ones((1, 2), dtype=np.int64), shape), started, shape)
    slots = rule("dynamic", model).route(ids, sources, planned, shape, 0, step=0)
    assert (slots[:, 0] // 2 != sources).any()


def test_sglang_static_prefers_the_replica_of_the_node() -> None:
    """Four ranks on two nodes; the expert is on ranks 0 and 2."""
    placement = np.array([[0, 1, 0, 2]], dtype=np.int32)
    shape = ExpertShape(1, 3, 4, 4)
    ids = np.zeros((4, 1), dtype=np.int32)
    sources = np.arange(4, dtype=np.int32)
    two = sglang_model(nodes=2).rules[0].route(ids, sources, placement, shape, 0, step=0)
    assert two[:, 0].tolist() == [0, 0, 2, 2]
    with pytest.raises(PlacementError, match="4 ranks do not divide among 3 nodes"):
        sglang_model(nodes=3).rules[0].parts(placement, shape)


def test_sglang_lp_levels_what_parts_can_level() -> None:
    """Expert 0 is on both ranks, and has to make up for what else they have."""
    lp = LpDispatch(ExpertLocations())
    placement = np.array([[0, 1, 0, 2]], dtype=np.int32)
    shape = ExpertShape(1, 3, 4, 2)
    parts = lp.batch_parts(np.array([[60, 40, 20]]), placement, shape)
    np.testing.assert_allclose(parts, [[1 / 3, 1, 2 / 3, 1]], atol=1e-3)
    assert lp.split is SplitKind.BY_BATCH
    with pytest.raises(NotImplementedError):
        lp.parts(placement, shape)


def test_sglang_lp_draws_by_the_counts_of_the_batch() -> None:
    model = sglang_model()
    placement = np.array([[0, 1, 0, 2]], dtype=np.int32)
    shape = ExpertShape(1, 3, 4, 2)
    planned = rule("lp", model)
    locations = planned.locations  # type: ignore[attr-defined]
    maps = locations.of(placement, shape).maps
    locations.add_planned(placement, maps, shape)
    ids = np.repeat(np.arange(3), [6000, 4000, 2000])[:, None].astype(np.int32)
    slots = planned.route(ids, np.zeros(len(ids), dtype=np.int32), placement, shape, 0, step=0)
    rows = np.bincount(slots[:, 0], minlength=4)
    assert abs(rows[0] - 2000) < 5 * np.sqrt(6000 * 2 / 9)


def test_sglang_groups_stay_on_a_node() -> None:
    shape = ExpertShape(3, 16, 24, 4)
    load = np.random.default_rng(0).integers(0, 100, (3, 16))
    planned, maps = DeepseekPlanner(groups=4, nodes=2).plan(load, shape)
    check_placement(planned, shape)
    group = planned // 4
    for node in np.split(group, 2, axis=1):
        assert all(len(set(layer)) == 2 for layer in node.tolist())
    assert (maps.logical_to_physical >= 0).sum() == shape.layers * shape.slots


@pytest.mark.parametrize(
    ("groups", "nodes", "message"),
    [
        (3, 1, "16 experts do not divide among 3 groups"),
        (4, 3, "4 groups do not divide among 3 nodes"),
        (8, 8, "4 ranks do not divide among 8 nodes"),
    ],
)
def test_sglang_plan_refuses_groups_that_do_not_divide(
    groups: int, nodes: int, message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        DeepseekPlanner(groups=groups, nodes=nodes).plan(
            np.ones((1, 16), dtype=np.int64), ExpertShape(1, 16, 24, 4)
        )


def test_sglang_maps_follow_a_placement_that_is_changed_in_place() -> None:
    model = sglang_model()
    placement = np.array([[0, 1], [0, 1]], dtype=np.int32)
    shape = ExpertShape(2, 2, 2, 2)
    static = rule("static", model)
    assert static.parts(placement, shape).tolist() == [[1, 1], [1, 1]]
    ids, sources = np.array([[0]], dtype=np.int32), np.zeros(1, dtype=np.int32)
    assert static.route(ids, sources, placement, shape, 1, step=0).item() == 0
    placement[1] = [1, 0]
    assert static.route(ids, sources, placement, shape, 1, step=0).item() == 1


def test_sglang_default_is_static_dispatch_and_a_blocking_rebalance() -> None:
    assert [each.name for each in SGLANG.rules] == [
        "static",
        "dynamic",
        "dynamic_rank_invariant",
        "lp",
    ]
    cadence = SGLANG.cadence
    assert (cadence.window, cadence.interval, cadence.first) == (1000, 1000, 1001)
    assert cadence.blocking
    assert cadence.layers_per_step is None
