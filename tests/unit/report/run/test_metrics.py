"""The formulas against answers worked out by hand and against what must not matter."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from equipoise.demo.run_record import Counts, RunRecord
from equipoise.report.run import metrics
from equipoise.report.run.metrics import StepRange, noise_floor

loads = arrays(
    np.int64, array_shapes(min_dims=3, max_dims=3, max_side=5), elements=st.integers(1, 99)
)


def whole(rank_rows: Counts) -> StepRange:
    return StepRange(0, len(rank_rows))


def test_imbalance_is_mean_of_max_over_mean_minus_one() -> None:
    rank_rows = np.array([[[30, 10], [20, 20]], [[40, 0], [25, 15]]])
    assert metrics.imbalance(rank_rows, StepRange(0, 2)) == pytest.approx((0.5 + 0 + 1 + 0.25) / 4)
    assert metrics.imbalance(rank_rows, StepRange(1, 2)) == pytest.approx((1 + 0.25) / 2)
    assert metrics.imbalance_by_step(rank_rows) == pytest.approx([0.25, 0.625])


def test_balancedness_is_mean_over_max() -> None:
    assert metrics.balancedness(np.array([[[30, 10], [20, 20]]]), StepRange(0, 1)) == pytest.approx(
        (2 / 3 + 1) / 2
    )


@given(rank_rows=loads, seed=st.randoms(use_true_random=False))
def test_imbalance_is_independent_of_rank_order(rank_rows: Counts, seed: object) -> None:
    order = list(range(rank_rows.shape[-1]))
    seed.shuffle(order)  # type: ignore[attr-defined]
    shuffled_rows = rank_rows[..., order]
    assert metrics.imbalance(shuffled_rows, whole(rank_rows)) == pytest.approx(
        metrics.imbalance(rank_rows, whole(rank_rows))
    )


@given(rank_rows=loads, factor=st.integers(2, 50))
def test_imbalance_is_scale_invariant(rank_rows: Counts, factor: int) -> None:
    assert metrics.imbalance(factor * rank_rows, whole(rank_rows)) == pytest.approx(
        metrics.imbalance(rank_rows, whole(rank_rows))
    )


@given(rank_rows=loads)
def test_imbalance_is_between_zero_and_ranks_minus_one(rank_rows: Counts) -> None:
    imbalance = metrics.imbalance(rank_rows, whole(rank_rows))
    assert -1e-12 <= imbalance <= rank_rows.shape[-1] - 1


@given(ranks=st.integers(1, 8), load=st.integers(1, 1000))
def test_imbalance_of_equal_loads_is_zero(ranks: int, load: int) -> None:
    rank_rows = np.full((3, 2, ranks), load)
    assert metrics.imbalance(rank_rows, StepRange(0, 3)) == 0.0
    assert metrics.balancedness(rank_rows, StepRange(0, 3)) == 1.0


def test_imbalance_omits_layers_without_rows() -> None:
    rank_rows = np.array([[[30, 10], [0, 0]]])
    assert metrics.imbalance(rank_rows, StepRange(0, 1)) == pytest.approx(0.5)
    assert np.isnan(metrics.imbalance(rank_rows[:, 1:], StepRange(0, 1)))


def test_floor_averages_noise_floors_of_steps() -> None:
    rank_rows = np.array([[[3, 1]], [[8, 8]], [[0, 0]]])
    expected = (noise_floor(4, 2) + noise_floor(16, 2)) / 2
    assert metrics.mean_noise_floor(rank_rows, StepRange(0, 3)) == pytest.approx(expected)


def test_stall_is_time_above_unbalanced_median() -> None:
    unbalanced_seconds = np.array([9.0, 1.0, 1.2, 0.8])
    balanced_seconds = np.array([9.0, 1.5, 0.1, 1.1])
    assert metrics.stall_seconds(
        balanced_seconds, unbalanced_seconds, StepRange(1, 4)
    ) == pytest.approx(0.5 + 0.1)
    assert metrics.stall_seconds(
        unbalanced_seconds, unbalanced_seconds, StepRange(1, 4)
    ) == pytest.approx(0.2)
    assert metrics.stall_seconds(balanced_seconds, unbalanced_seconds, StepRange(4, 4)) == 0.0


def test_metric_windows_start_at_first_commit_and_rebalance(
    make_record: Callable[..., RunRecord],
    make_variant: Callable[..., object],
    make_rebalance: Callable[..., object],
    make_rows: Callable[..., Counts],
) -> None:
    rebalances = (make_rebalance(0, 4, outcome="timeout"), make_rebalance(1, 8))
    variant = make_variant("exact", make_rows([1, 1], [1, 1]), *rebalances)
    assert metrics.after_first_commit(variant, 12) == StepRange(8, 12)  # type: ignore[arg-type]
    assert metrics.after_first_rebalance_began(variant, 12) == StepRange(2, 12)  # type: ignore[arg-type]
    assert metrics.after_first_commit(None, 12) == StepRange(0, 12)
    assert metrics.after_first_rebalance_began(None, 12) == StepRange(0, 12)
