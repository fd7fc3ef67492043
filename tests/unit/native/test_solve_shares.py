"""Shares and routing tables: equal to the reference, level, and never worse than even shares."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from equipoise import _native
from equipoise.hal import routing

UNHURRIED = settings(deadline=None)
SHARE_ONE = 65536
Layer = tuple[NDArray[np.int64], NDArray[np.int32], int]


@st.composite
def layers(draw: st.DrawFn, most: int = 300) -> Layer:
    """Counts, placement, ranks of one layer: replicas share ranks, experts lack tokens."""
    ranks, per_rank = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    slots = ranks * per_rank
    experts = draw(st.integers(1, slots))
    spare = st.integers(0, experts - 1)
    extra = draw(st.lists(spare, min_size=slots - experts, max_size=slots - experts))
    placement = draw(st.permutations([*range(experts), *extra]))
    counts = draw(st.lists(st.integers(0, most), min_size=experts, max_size=experts))
    return np.array(counts, dtype=np.int64), np.array(placement, dtype=np.int32), ranks


def solve(layer: Layer, sweeps: int = routing.SWEEPS) -> NDArray[np.int32]:
    counts, placement, ranks = layer
    solved = _native.solve_shares(counts[None], placement[None], ranks, sweeps)
    return solved.reshape(-1)


def even_shares(placement: NDArray[np.int32]) -> NDArray[np.int32]:
    shares = np.zeros_like(placement)
    for expert in set(placement.tolist()):
        slots = np.flatnonzero(placement == expert)
        shares[slots] = SHARE_ONE // len(slots)
        shares[slots[: SHARE_ONE % len(slots)]] += 1
    return shares


def peak(layer: Layer, shares: NDArray[np.int32]) -> Fraction:
    counts, placement, ranks = layer
    loads = counts[placement].astype(object) * shares.astype(object)
    return Fraction(int(loads.reshape(ranks, -1).sum(axis=1).max()), SHARE_ONE)


def lowest_peak(layer: Layer) -> Fraction:
    """The optimum of any fractional division: the densest set of ranks (max-flow min-cut)."""
    counts, placement, ranks = layer
    per_rank = len(placement) // ranks
    homes = [set((np.flatnonzero(placement == e) // per_rank).tolist()) for e in range(len(counts))]
    groups = [set(g) for n in range(1, ranks + 1) for g in combinations(range(ranks), n)]
    return max(
        Fraction(sum(int(n) for n, home in zip(counts, homes, strict=True) if home <= g), len(g))
        for g in groups
    )


@UNHURRIED
@given(layers(), st.integers(0, 20))
def test_solve_shares_equals_reference(layer: Layer, sweeps: int) -> None:
    counts, placement, ranks = layer
    reference = routing.solve_shares(
        torch.from_numpy(counts)[None], torch.from_numpy(placement)[None], ranks, sweeps
    )
    assert solve(layer, sweeps).tolist() == reference[0].tolist()


@UNHURRIED
@given(layers(most=(2**46 - 1) // 20))
def test_solve_shares_equals_reference_for_large_counts(layer: Layer) -> None:
    counts, placement, ranks = layer
    reference = routing.solve_shares(
        torch.from_numpy(counts)[None], torch.from_numpy(placement)[None], ranks
    )
    assert solve(layer).tolist() == reference[0].tolist()


@UNHURRIED
@given(layers())
def test_solve_shares_sums_to_one_per_expert(layer: Layer) -> None:
    counts, placement, _ = layer
    shares = solve(layer)
    assert (shares >= 0).all()
    sums = np.bincount(placement, weights=shares, minlength=len(counts))
    assert sums.tolist() == [SHARE_ONE] * len(counts)


@pytest.mark.slow
@UNHURRIED
@given(layers(), st.integers(0, 20))
def test_solve_shares_peak_is_no_worse_than_even_shares(layer: Layer, sweeps: int) -> None:
    assert peak(layer, solve(layer, sweeps)) <= peak(layer, even_shares(layer[1]))


@UNHURRIED
@given(layers())
def test_solve_shares_reaches_optimum_within_rounding(layer: Layer) -> None:
    counts, placement, _ = layer
    rounding = Fraction(int(counts[placement].sum()) + len(placement), SHARE_ONE)
    solved_peak = peak(layer, solve(layer, sweeps=20_000))
    optimum = lowest_peak(layer)
    assert solved_peak >= optimum
    assert solved_peak <= optimum + rounding


@UNHURRIED
@given(layers())
def test_solve_shares_divides_idle_expert_evenly(layer: Layer) -> None:
    counts, placement, _ = layer
    idle = counts[placement] == 0
    assert (solve(layer) == even_shares(placement))[idle].all()


@UNHURRIED
@given(layers(), st.integers(0, 20), st.sampled_from([torch.int32, torch.int64]))
def test_solve_cumulative_equals_table_of_solved_shares(
    layer: Layer, sweeps: int, dtype: torch.dtype
) -> None:
    counts, placement, ranks = layer
    table = build(placement, solve(layer, sweeps), len(counts))
    cumulative = np.full_like(table[2], -1)
    load = torch.from_numpy(counts).to(dtype)
    _native.solve_cumulative(load, *table[:2], ranks, sweeps, cumulative)
    assert cumulative.tolist() == table[2].tolist()
    reference = routing.RoutingTable(*map(torch.from_numpy, table))
    solved = routing.solve_cumulative(torch.from_numpy(counts), reference, ranks, sweeps)
    assert solved.tolist() == cumulative.tolist()


def build(
    placement: NDArray[np.int32], shares: NDArray[np.int32], experts: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    start = np.full(experts + 1, -1, dtype=np.int32)
    replicas, cumulative = np.full_like(placement, -1), np.full_like(placement, -1)
    _native.build_table(placement, shares, experts, start, replicas, cumulative)
    return start, replicas, cumulative


@UNHURRIED
@given(layers())
def test_build_table_equals_reference(layer: Layer) -> None:
    counts, placement, _ = layer
    shares = solve(layer)
    table = build(placement, shares, len(counts))
    reference = routing.build_table(
        torch.from_numpy(placement), torch.from_numpy(shares), len(counts)
    )
    expected = (reference.start, reference.replicas, reference.cumulative)
    assert [part.tolist() for part in table] == [part.tolist() for part in expected]


def test_solve_shares_treats_layers_independently() -> None:
    counts = np.array([[8, 4, 0], [0, 5, 9]], dtype=np.int64)
    placement = np.array([[0, 1, 0, 2], [2, 1, 2, 0]], dtype=np.int32)
    together = _native.solve_shares(counts, placement, 2)
    apart = [solve((counts[i], placement[i], 2)).tolist() for i in range(2)]
    assert together.tolist() == apart
    assert together[0].tolist() == [SHARE_ONE // 4, SHARE_ONE, SHARE_ONE * 3 // 4, SHARE_ONE]


def test_solve_shares_splits_rank_evenly_among_its_replicas() -> None:
    counts, placement = np.array([30, 10], dtype=np.int64), np.array([0, 0, 0, 1], dtype=np.int32)
    # 20 of 30 tokens on rank 0: a third each, the odd 65536th on the lowest slot.
    assert solve((counts, placement, 2)).tolist() == [21846, 21845, 21845, SHARE_ONE]


def test_solve_shares_largest_counts_do_not_overflow() -> None:
    # Rank 3 alone holds nearly all that 62 bits can: three times its load would overflow.
    counts = np.array([3 * 2**44, 300, 0], dtype=np.int64)
    placement = np.array([1, 2, 1, 2, 1, 2, 1, 0], dtype=np.int32)
    shares = solve((counts, placement, 4))
    assert shares[placement == 1].tolist() == [21846, 21845, 21845, 0]
