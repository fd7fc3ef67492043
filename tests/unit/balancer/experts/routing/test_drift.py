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


def sub_window_loads(kind: int, seed: int, count: int) -> list[Load]:
    """Sub-windows of one kind of traffic: they differ by chance alone."""
    rng = np.random.default_rng((kind, 0))
    odds = np.exp(rng.standard_normal((SHAPE.layers, SHAPE.experts)))
    odds /= odds.sum(axis=1, keepdims=True)
    rng = np.random.default_rng((kind, seed, 1))
    return [rng.multinomial(ROWS, odds).astype(np.int64) for _ in range(count)]


def planned_layout(loads: list[Load]) -> Layout:
    """A placement and its shares."""
    load = np.stack(loads)
    proposal = plan(load, slots=SHAPE.slots, ranks=SHAPE.ranks, policy="connected")
    return Layout(proposal.placement, proposal.shares)


def follow(follower: DriftDetector, layout: Layout, loads: list[Load]) -> list[Shares | None]:
    """The new shares for each load, or None; new shares are applied before the next load."""
    renewed_shares = []
    for load in loads:
        renewed_shares.append(follower.new_shares(load, layout))
        layout = (
            layout if renewed_shares[-1] is None else Layout(layout.placement, renewed_shares[-1])
        )
    return renewed_shares


def drift_detector(drift_threshold: int = 655) -> DriftDetector:
    return DriftDetector(SHAPE, drift_threshold, planned=PLANNED)


def renewals(renewed_shares: list[Shares | None]) -> int:
    return sum(shares is not None for shares in renewed_shares)


def test_follower_ignores_sampling_noise() -> None:
    """64 sub-windows: sums double four times; and now and then an alarm is false."""
    renewal_counts = []
    for seed in SEEDS:
        loads = sub_window_loads(0, seed, PLANNED + REMEMBERED_SUB_WINDOWS + 64)
        renewed_shares = follow(drift_detector(), planned_layout(loads[:PLANNED]), loads[PLANNED:])
        renewal_counts.append(renewals(renewed_shares[REMEMBERED_SUB_WINDOWS:]))
    assert sum(renewal_counts) <= 6 * len(SEEDS), renewal_counts


@pytest.mark.parametrize("seed", SEEDS)
def test_follower_solves_at_once_for_a_clear_difference(seed: int) -> None:
    """The start layout's even shares, before anything is learnt."""
    (load,) = sub_window_loads(0, seed, 1)
    placement = planned_layout(sub_window_loads(1, seed, 2)).placement
    even = Layout(placement, even_shares(placement, SHAPE.experts))
    (renewed_shares,) = follow(drift_detector(), even, [load])
    np.testing.assert_array_equal(renewed_shares, solve_shares(load, placement, SHAPE))


@pytest.mark.parametrize("seed", SEEDS)
def test_follower_reacts_in_first_sub_window_after_traffic_change(seed: int) -> None:
    loads, later = sub_window_loads(0, seed, 2 * PLANNED), sub_window_loads(1, seed, 1)
    layout = planned_layout(loads[:PLANNED])
    renewed_shares = follow(drift_detector(), layout, [*loads[PLANNED:], *later])
    assert renewed_shares[-1] is not None
    np.testing.assert_array_equal(
        renewed_shares[-1], solve_shares(later[0], layout.placement, SHAPE)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_follower_reacts_after_a_mixed_sub_window(seed: int) -> None:
    loads, later = sub_window_loads(0, seed, 2 * PLANNED), sub_window_loads(1, seed, 1)
    mixed_load = (loads[-1] + later[0]) // 2
    layout = planned_layout(loads[:PLANNED])
    renewed_shares = follow(drift_detector(), layout, [*loads[PLANNED:], mixed_load, *later])
    assert renewed_shares[-2] is not None
    np.testing.assert_array_equal(
        renewed_shares[-1], solve_shares(later[0], layout.placement, SHAPE)
    )


def test_follower_solves_from_all_loads_since_last_change() -> None:
    loads, later = (
        sub_window_loads(0, 0, PLANNED + REMEMBERED_SUB_WINDOWS),
        sub_window_loads(1, 0, 4),
    )
    layout = planned_layout(loads[:PLANNED])
    renewed_shares = follow(drift_detector(6554), layout, [*loads[PLANNED:], *later])[-4:]
    sums = np.cumsum(later, axis=0)
    for count, shares in enumerate(renewed_shares, start=1):
        if count == 3:
            assert shares is None
            continue
        expected = solve_shares(sums[count - 1], layout.placement, SHAPE)
        np.testing.assert_array_equal(shares, expected)


@settings(deadline=None, max_examples=25)
@given(kinds=st.lists(st.integers(0, 3), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_follower_decides_alike_on_ranks_with_equal_loads(kinds: list[int], seed: int) -> None:
    loads = [sub_window_loads(kind, seed + place, 1)[0] for place, kind in enumerate(kinds)]
    layout = planned_layout(loads[:1])
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
    loads = [sub_window_loads(kind, 0, 1)[0] for kind in kinds]
    before = [load.copy() for load in loads]
    follow(drift_detector(), planned_layout(loads[:1]), loads)
    np.testing.assert_array_equal(loads, before)


def test_follower_solves_from_any_number_of_sub_windows() -> None:
    load = np.full((SHAPE.layers, SHAPE.experts), 2**41, dtype=np.int64)
    layout = planned_layout([load])
    follower = DriftDetector(SHAPE, drift_threshold=10_000, planned=1)
    renewed_shares = [
        shares for shares in follow(follower, layout, [load] * 40) if shares is not None
    ]
    assert len(renewed_shares) > 3, "each time that they rest on twice as many"
    for shares in renewed_shares:
        np.testing.assert_array_equal(shares, solve_shares(load, layout.placement, SHAPE))
