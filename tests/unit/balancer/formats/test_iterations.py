"""Ranges of iterations, and the part of statistics that they name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.formats import ExpertStatistics, IterationRange
from equipoise.hal.errors import PlacementError


@given(start=st.integers(0, 10**11), length=st.integers(1, 10**11))
def test_iterations_parse_inverts_str(start: int, length: int) -> None:
    iterations = IterationRange.parse(f"{start}-{start + length}")
    assert (
        IterationRange.parse(str(iterations)) == iterations == IterationRange(start, start + length)
    )
    assert len(iterations) == length


def test_iterations_exclude_their_end() -> None:
    assert [i for i in range(20) if i in IterationRange(10, 13)] == [10, 11, 12]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "5-5",
        "6-5",
        "-5",
        "5-",
        "a-b",
        "1-2-3",
        " 1-2",
        "1-2 ",
        "1.0-2",
        "-1-2",
        "\u00b2-3",
    ],
)
def test_iterations_parse_refuses_bad_or_empty_range(text: str) -> None:
    with pytest.raises(ValueError, match=r"START-STOP|no iteration"):
        IterationRange.parse(text)


def statistics_from(first: int | None) -> ExpertStatistics:
    by_rank = np.arange(2 * 4 * 1 * 3, dtype=np.int64).reshape(2, 4, 1, 3)
    return ExpertStatistics(by_rank.sum(axis=0), (7,), by_rank, first, 2)


def test_statistics_during_selects_iterations() -> None:
    all_statistics = statistics_from(100)
    selected_statistics = all_statistics.select_iterations(IterationRange(101, 103))
    assert all_statistics.by_rank is not None
    expected = ExpertStatistics(
        all_statistics.counts[1:3], (7,), all_statistics.by_rank[:, 1:3], 101, 2
    )
    assert selected_statistics.same(expected)
    assert all_statistics.select_iterations(all_statistics.iteration_range).same(all_statistics)


def test_statistics_during_counts_unnumbered_windows_from_zero() -> None:
    part = statistics_from(None).select_iterations(IterationRange(3, 4))
    assert (part.windows, part.first_iteration) == (1, None)


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (100, "has iterations 100-104, and 102-105 is not within them"),
        (None, "has windows, counted from 0, 0-4, and 102-105 is not within them"),
    ],
)
def test_statistics_during_refuses_unrecorded_iterations(first: int | None, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        statistics_from(first).select_iterations(IterationRange(102, 105))
