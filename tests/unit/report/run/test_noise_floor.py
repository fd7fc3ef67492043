"""The noise floor, three ways."""

import itertools
from fractions import Fraction
from math import factorial, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.report.run.metrics import (
    EXACT_UP_TO,
    exact_noise_floor,
    noise_floor,
    normal_noise_floor,
)


def enumerated_floor(rows: int, ranks: int) -> Fraction:
    """Every way to fill the ranks, weighted by the number of throws that lead there."""
    total = Fraction(0)
    for counts in itertools.product(range(rows + 1), repeat=ranks):
        if sum(counts) == rows:
            ways = factorial(rows) // prod(factorial(count) for count in counts)
            total += Fraction(max(counts) * ways, ranks**rows)
    return total * ranks / rows - 1


@given(rows=st.integers(1, 9), ranks=st.integers(1, 4))
def test_exact_floor_equals_enumeration(rows: int, ranks: int) -> None:
    assert exact_noise_floor(rows, ranks) == pytest.approx(
        float(enumerated_floor(rows, ranks)), abs=1e-9
    )


@pytest.mark.parametrize(("rows", "ranks"), [(64, 4), (1000, 4), (1024, 8), (600, 64)])
def test_exact_floor_matches_simulation(rows: int, ranks: int) -> None:
    throws = np.random.default_rng(7).multinomial(rows, [1 / ranks] * ranks, size=20_000)
    simulated_imbalance = throws.max(axis=1) * ranks / rows - 1
    tolerance = 5 * simulated_imbalance.std() / np.sqrt(len(simulated_imbalance))
    assert exact_noise_floor(rows, ranks) == pytest.approx(
        simulated_imbalance.mean(), abs=tolerance
    )


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_normal_floor_is_within_one_percent_at_switch(ranks: int) -> None:
    rows = EXACT_UP_TO * ranks
    assert normal_noise_floor(rows, ranks) == pytest.approx(
        exact_noise_floor(rows, ranks), rel=0.0105
    )


def test_normal_floor_of_two_ranks_is_inverse_root_pi() -> None:
    assert normal_noise_floor(2, 2) == pytest.approx(np.pi**-0.5, rel=1e-6)


@given(rows=st.integers(1, 10**7))
def test_noise_floor_of_one_rank_is_zero(rows: int) -> None:
    assert noise_floor(rows, 1) == 0.0


@given(rows=st.integers(1, 3000), ranks=st.integers(2, 8))
def test_noise_floor_decreases_with_four_times_rows(rows: int, ranks: int) -> None:
    assert noise_floor(4 * rows * ranks, ranks) < noise_floor(rows * ranks, ranks)


@pytest.mark.parametrize(("rows", "ranks"), [(0, 4), (4, 0)])
def test_noise_floor_rejects_zero_rows_or_ranks(rows: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="needs rows and ranks"):
        noise_floor(rows, ranks)


def test_exact_floor_terminates_for_many_rows_and_ranks() -> None:
    """The rounding of the transform alone once kept the sum from its end."""
    assert exact_noise_floor(12_800, 32) == pytest.approx(normal_noise_floor(12_800, 32), rel=0.03)
    assert noise_floor(32_768, 576) > normal_noise_floor(32_768, 576)
