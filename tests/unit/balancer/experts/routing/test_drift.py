"""Lagged shares follow the traffic, not its noise."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balancer.experts.placement import (
    ExpertShape,
    Layout,
    Load,
    Shares,
    even_shares,
    solve_shares,
)
from equipoise.balancer.experts.planning.planner import plan
from equipoise.balancer.experts.routing.drift import REMEMBERED_SUB_WINDOWS, DriftDetector

SHAPE = ExpertShape(layers=4, experts=16, slots=24, ranks=4)
ROWS = 2000
PLANNED = 8
SEEDS = range(5)


def drawn(kind: int, seed: int, count: int) -> list[Load]:
    """Sub-windows of one kind of traffic: they differ by chance alone."""
    rng = np.random.default_rng((kind, 0))
    odds = np.exp(rng.standard_normal((SHAPE.layers, SHAPE.experts)))
    odds /= odds.sum(axis=1, keepdims=True)
    rng = np.random.default_rng((kind, seed, 1))
    return [rng.multinomial(ROWS, odds).astype(np.int64) for _ in range(count)]


def planned(loads: list[Load]) -> Layout:
    """A placement and its shares."""
    load = np.stack(loads)
    found = plan(load, slots=SHAPE.slots, ranks=SHAPE.ranks, policy="connected")
    return Layout(found.placement, found.shares)


def follow(follower: DriftDetector, layout: Layout, loads: list[Load]) -> list[Shares | None]:
    """What is said to each load, while all that is said is done."""
    told = []
    for load in loads:
        told.append(follower.new_shares(load, layout))
        layout = layout if told[-1] is None else Layout(layout.placement, told[-1])
    return told


def drift_detector(drift_threshold: int = 655) -> DriftDetector:
    return DriftDetector(SHAPE, drift_threshold, planned=PLANNED)


def renewals(told: list[Shares | None]) -> int:
    return sum(shares is not None for shares in told)


def test_follower_ignores_sampling_noise() -> None:
    """64 sub-windows: sums double four times; and now and then an alarm is false."""
    told = []
    for seed in SEEDS:
        loads = drawn(0, seed, PLANNED + REMEMBERED_SUB_WINDOWS + 64)
        learnt = follow(drift_detector(), planned(loads[:PLANNED]), loads[PLANNED:])
        told.append(renewals(learnt[REMEMBERED_SUB_WINDOWS:]))
    assert sum(told) <= 6 * len(SEEDS), told


@pytest.mark.parametrize("seed", SEEDS)
def test_follower_solves_at_once_for_a_clear_difference(seed: int) -> None:
    """The start layout's even shares, before anything is learnt."""
    (load,) = drawn(0, seed, 1)
    placement = planned(drawn(1, seed, 2)).placement
    even = Layout(placement, even_shares(placement, SHAPE.experts))
    (told,) = follow(drift_detector(), even, [load])
    np.testing.assert_array_equal(told, solve_shares(load, placement, SHAPE))


@pytest.mark.parametrize("seed", SEEDS)
def test_follower_reacts_in_first_sub_window_after_traffic_change(seed: int) -> None:
    loads, later = drawn(0, seed, 2 * PLANNED), drawn(1, seed, 1)
    layout = planned(loads[:PLANNED])
    told = follow(drift_detector(), layout, [*loads[PLANNED:], *later])
    assert told[-1] is not None
    np.testing.assert_array_equal(told[-1], solve_shares(later[0], layout.placement, SHAPE))


@pytest.mark.parametrize("seed", SEEDS)
def test_follower_reacts_after_a_mixed_sub_window(seed: int) -> None:
    loads, later = drawn(0, seed, 2 * PLANNED), drawn(1, seed, 1)
    mixed = (loads[-1] + later[0]) // 2
    layout = planned(loads[:PLANNED])
    told = follow(drift_detector(), layout, [*loads[PLANNED:], mixed, *later])
    assert told[-2] is not None
    np.testing.assert_array_equal(told[-1], solve_shares(later[0], layout.placement, SHAPE))


def test_follower_solves_from_all_loads_since_last_change() -> None:
    loads, later = drawn(0, 0, PLANNED + REMEMBERED_SUB_WINDOWS), drawn(1, 0, 4)
    layout = planned(loads[:PLANNED])
    told = follow(drift_detector(6554), layout, [*loads[PLANNED:], *later])[-4:]
    sums = np.cumsum(later, axis=0)
    for count, shares in enumerate(told, start=1):
        if count == 3:
            assert shares is None
            continue
        expected = solve_shares(sums[count - 1], layout.placement, SHAPE)
        np.testing.assert_array_equal(shares, expected)


@settings(deadline=None, max_examples=25)
@given(kinds=st.lists(st.integers(0, 3), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_follower_decides_alike_on_ranks_with_equal_loads(kinds: list[int], seed: int) -> None:
    loads = [drawn(kind, seed + place, 1)[0] for place, kind in enumerate(kinds)]
    layout = planned(loads[:1])
    for one, other in zip(
        follow(drift_detector(), layout, loads),
        follow(drift_detector(), layout, loads),
        strict=True,
    ):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            np.testing.assert_array_equal(one, other)


@settings(deadline=None, max_examples=25)
@given(kinds=st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_follower_does_not_modify_its_loads(kinds: list[int]) -> None:
    loads = [drawn(kind, 0, 1)[0] for kind in kinds]
    before = [load.copy() for load in loads]
    follow(drift_detector(), planned(loads[:1]), loads)
    np.testing.assert_array_equal(loads, before)


def test_follower_solves_from_any_number_of_sub_windows() -> None:
    load = np.full((SHAPE.layers, SHAPE.experts), 2**41, dtype=np.int64)
    layout = planned([load])
    follower = DriftDetector(SHAPE, drift_threshold=10_000, planned=1)
    solved = [shares for shares in follow(follower, layout, [load] * 40) if shares is not None]
    assert len(solved) > 3, "each time that they rest on twice as many"
    for shares in solved:
        np.testing.assert_array_equal(shares, solve_shares(load, layout.placement, SHAPE))
