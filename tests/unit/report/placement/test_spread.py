"""The figures of Table 1, against their definitions spelt out."""

from itertools import combinations_with_replacement, product
from statistics import mean, stdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balancer.experts import plan
from equipoise.balancer.formats import ExpertPlacement, ExpertStatistics
from equipoise.hal.errors import PlacementError
from equipoise.report.placement.spread import layout_load, linear, lower_bound, select_layers

COUNTS = np.array([[[4, 0, 2, 2], [1, 1, 1, 1]], [[0, 6, 1, 1], [9, 0, 0, 3]]], dtype=np.int64)


def test_spread_by_rank_follows_definition() -> None:
    spread = layout_load("", ExpertStatistics(COUNTS), linear(ExpertStatistics(COUNTS), 2)).by_rank
    layers: list[list[list[int]]] = [[[4, 4], [6, 2]], [[2, 2], [9, 3]]]
    for layer, windows in enumerate(layers):
        assert spread.mean[layer] == mean(mean(row) for row in windows)
        assert spread.std[layer] == pytest.approx(mean(stdev(row) for row in windows))
        assert spread.imbalance[layer] == mean(max(row) / mean(row) - 1 for row in windows)
    assert spread.average == pytest.approx(
        [x.mean() for x in (spread.mean, spread.std, spread.imbalance)]
    )
    assert spread.worst == 0


def test_imbalance_by_window_is_mean_over_layers_with_rows() -> None:
    counts = np.concatenate([COUNTS, np.zeros_like(COUNTS[:1]), COUNTS[1:]])
    counts[3, 1] = 0
    statistics = ExpertStatistics(counts)
    by_window = layout_load("", statistics, linear(statistics, 2)).by_window
    # [4, 4] and [2, 2]; [6, 2] and [9, 3]; nothing; [6, 2] alone.
    assert by_window == pytest.approx([0.0, 0.5, np.nan, 0.5], nan_ok=True)


def test_spread_by_slot_divides_expert_among_copies() -> None:
    placement = np.array([[0, 1, 2, 3, 0, 0]] * 2, dtype=np.int32)
    layout = ExpertPlacement.with_even_shares(placement, 2)
    load = layout_load("", ExpertStatistics(COUNTS), layout)
    windows: list[list[float]] = [[4 / 3, 0, 2, 2, 4 / 3, 4 / 3], [0, 6, 1, 1, 0, 0]]
    assert load.by_slot.std[0] == pytest.approx(mean(stdev(row) for row in windows), rel=1e-12)
    assert load.rank_rows[0] == pytest.approx([4 / 3 + 2 + 6 + 1, 2 + 8 / 3 + 1])


def test_spread_uses_uneven_shares() -> None:
    placement = np.array([[0, 1, 2, 3, 0, 1]] * 2, dtype=np.int32)
    shares = np.array([[1 << 14, 1 << 16, 1 << 16, 1 << 16, 3 << 14, 0]] * 2, dtype=np.int32)
    load = layout_load("", ExpertStatistics(COUNTS), ExpertPlacement(placement, shares, 2))
    assert load.rank_rows[0] == pytest.approx([1 + 6 + 3, 3 + 3 + 0])


def test_spread_omits_windows_and_layers_without_rows() -> None:
    counts = np.zeros((2, 2, 4), dtype=np.int64)
    counts[0, 0] = COUNTS[0, 0]
    spread = layout_load("", ExpertStatistics(counts), linear(ExpertStatistics(counts), 2)).by_rank
    assert spread.mean[0] == 4
    assert np.isnan([spread.mean[1], spread.std[1], spread.imbalance[1]]).all()
    assert spread.average == (4, 0, 0)


def test_spread_of_one_rank_has_zero_deviation() -> None:
    statistics = ExpertStatistics(COUNTS)
    assert layout_load("", statistics, linear(statistics, 1)).by_rank.std.tolist() == [0, 0]


def test_linear_placement_holds_all_experts_on_uneven_ranks() -> None:
    layout = linear(ExpertStatistics(COUNTS), 3)
    assert layout.slots == 6
    assert set(layout.placement[0].tolist()) == {0, 1, 2, 3}


def test_fitted_placement_matches_layer_numbers() -> None:
    placement = np.array([[0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2]], dtype=np.int32)
    layout = ExpertPlacement.with_even_shares(placement, 2, (3, 4, 7))
    fitted_layout = select_layers(layout, ExpertStatistics(COUNTS, (4, 7)))
    assert fitted_layout.placement.tolist() == placement[1:].tolist()
    assert fitted_layout.layers == (4, 7)
    with pytest.raises(PlacementError, match="has no layer 5"):
        select_layers(layout, ExpertStatistics(COUNTS, (4, 5)))
    with pytest.raises(PlacementError, match="places 4 experts, and the statistics are of 3"):
        select_layers(layout, ExpertStatistics(COUNTS[..., :3], (4, 7)))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 100), min_size=6, max_size=6), st.integers(0, 4))
def test_lower_bound_is_below_greedy_plan(loads: list[int], extra: int) -> None:
    counts = np.array([[loads]], dtype=np.int64)
    slots = 6 + 2 * extra
    bound = lower_bound(ExpertStatistics(counts), 2, slots)
    greedy_plan = plan(counts, slots=slots, ranks=2, policy="greedy")
    if sum(loads):
        assert bound[0] <= greedy_plan.predicted_imbalance + 1e-4
    else:
        assert np.isnan(bound[0])


@pytest.mark.parametrize("loads", list(combinations_with_replacement((1, 5, 12), 3)))
def test_lower_bound_equals_best_split_of_small_cases(loads: tuple[int, ...]) -> None:
    slots, ranks = 4, 2
    bound = lower_bound(ExpertStatistics(np.array([[loads]], dtype=np.int64)), ranks, slots)
    mean_load = sum(loads) / ranks
    splits = (c for c in product((1, 2), repeat=3) if sum(c) <= slots)
    least = min(max(w / c for w, c in zip(loads, copies, strict=True)) for copies in splits)
    assert bound[0] == pytest.approx(max(least, mean_load) / mean_load - 1, abs=1e-6)
