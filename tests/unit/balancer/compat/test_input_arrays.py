"""Counts of engines as integers."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from equipoise.balancer.compat.input_arrays import integer_counts

FLOATS = st.floats(0, 2.0**100, width=32)
WHOLES = st.integers(0, 2**40)


@given(arrays(np.int64, (2, 3, 4), elements=WHOLES))
def test_integer_counts_keep_integers(
    load: npt.NDArray[np.int64],
) -> None:
    assert (integer_counts(load) == load).all()
    assert (integer_counts(load.astype(np.float64)) == load).all()


@given(arrays(np.float32, (2, 5), elements=FLOATS))
def test_integer_counts_keep_ratios_of_fractional_counts(
    load: npt.NDArray[np.float32],
) -> None:
    counts = integer_counts(load)
    assert counts.dtype == np.int64
    assert counts.min() >= 0
    for load_row, count_row in zip(load.astype(np.float64), counts, strict=True):
        assert count_row.sum() < 2**46
        if load_row.max() > 0:
            assert np.abs(count_row / count_row.max() - load_row / load_row.max()).max() < 2**-38


def test_integer_counts_scale_large_integers_instead_of_refusing() -> None:
    counts = integer_counts(np.array([[2**62, 2**61, 0]], dtype=np.uint64))
    assert counts[0, 0] == 2 * counts[0, 1] > 0 == counts[0, 2]


@pytest.mark.parametrize("scale", [5e-324, 1e308])
def test_integer_counts_do_not_overflow_at_float_extremes(scale: float) -> None:
    counts = integer_counts(np.array([[scale, scale, 0.0]]))
    assert counts[0, 0] == counts[0, 1] > 0 == counts[0, 2]
