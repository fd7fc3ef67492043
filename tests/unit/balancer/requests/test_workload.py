"""A workload holds what it says it holds, and says what is kept of it."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from equipoise.balancer.requests.workload import MAX_TOKENS, Counts, Workload
from equipoise.hal.errors import UsageError

TOKENS = st.integers(1, 5000)
FRACTIONS: Any = np.ones(2)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """With and without times, with and without hashes."""
    rows = draw(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=12))
    prompts, outputs = np.array(rows, dtype=np.int64).T
    gaps = draw(st.lists(st.floats(0, 100), min_size=len(rows) - 1, max_size=len(rows) - 1))
    times = np.concatenate([[0.0], np.cumsum(gaps)])
    lengths = [draw(st.integers(0, -(-int(prompt) // 512))) for prompt in prompts]
    ids = draw(st.lists(st.integers(0, 9), min_size=sum(lengths), max_size=sum(lengths)))
    hashes = counts(*ids), counts(0, *np.cumsum(lengths))
    return Workload(
        "drawn",
        draw(st.sampled_from([times, None])),
        prompts,
        outputs,
        draw(st.sampled_from([hashes, None])),
    )


def counts(*values: int) -> Counts:
    """As int64."""
    return np.array(values, dtype=np.int64)


def rows_of(workload: Workload) -> list[tuple[int, int, tuple[int, ...]]]:
    """Prompt, output and hashes of every request."""
    has_hashes = workload.hashes is not None
    return [
        (
            int(workload.prompts[row]),
            int(workload.outputs[row]),
            tuple(workload.block_hashes_of(row).tolist()) if has_hashes else (),
        )
        for row in range(workload.count)
    ]


def three_requests(times: tuple[float, ...] | None = (0.0, 1.0, 4.0)) -> Workload:
    """Three requests."""
    arrivals = None if times is None else np.array(times)
    hashes = counts(7, 8, 7, 7, 9), counts(0, 2, 3, 5)
    return Workload("small", arrivals, counts(600, 10, 1024), counts(3, 4, 5), hashes)


@given(workloads(), st.data())
def test_workload_take_returns_first_requests(workload: Workload, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, workload.count))
    first_requests = workload.first(count)
    assert rows_of(first_requests) == rows_of(workload)[:count]
    if workload.arrivals is not None:
        assert np.array_equal(np.asarray(first_requests.arrivals), workload.arrivals[:count])


@given(workloads(), st.integers(0, 2**70))
def test_workload_shuffled_keeps_requests_whole_and_times(workload: Workload, seed: int) -> None:
    shuffled = workload.shuffled(seed)
    assert sorted(rows_of(shuffled)) == sorted(rows_of(workload))
    assert (shuffled.arrivals is None) == (workload.arrivals is None)
    if workload.arrivals is not None:
        assert np.array_equal(np.asarray(shuffled.arrivals), workload.arrivals)
    assert shuffled.same_requests(workload.shuffled(seed))


@given(workloads(), st.integers(0, 1000))
def test_workload_resampled_draws_whole_requests_without_hashes(
    workload: Workload, seed: int
) -> None:
    resampled = workload.resampled(seed)
    pairs = {row[:2] for row in rows_of(workload)}
    assert {row[:2] for row in rows_of(resampled)} <= pairs
    assert (resampled.count, resampled.hashes) == (workload.count, None)
    assert ("prefix hashes ignored: resampling destroys their order" in resampled.notes) == (
        workload.hashes is not None
    )


@given(workloads(), st.integers(1, 5000))
def test_workload_prompt_limit_keeps_others_in_order(workload: Workload, limit: int) -> None:
    rows_within_limit = [row for row in rows_of(workload) if row[0] <= limit]
    if not rows_within_limit:
        with pytest.raises(UsageError, match=f"no request with a prompt of at most {limit}"):
            workload.with_prompt_limit(limit)
        return
    limited_workload = workload.with_prompt_limit(limit)
    assert rows_of(limited_workload) == rows_within_limit
    dropped_count = workload.count - len(rows_within_limit)
    note = f"{dropped_count} of {workload.count} requests had prompts over {limit}: dropped"
    assert limited_workload.notes == ((note,) if dropped_count else ())


def test_workload_prompt_limit_starts_arrivals_at_zero() -> None:
    workload = Workload("a", np.array([0.0, 1.0, 4.0]), counts(9, 1, 2), counts(1, 1, 1))
    assert np.asarray(workload.with_prompt_limit(8).arrivals).tolist() == [0.0, 3.0]


@pytest.mark.slow
@given(st.floats(1e-3, 1e6), st.integers(2, 50))
def test_workload_scaled_to_rate_keeps_shape_of_arrivals(rate: float, count: int) -> None:
    times = np.cumsum(np.arange(count, dtype=np.float64))
    workload = Workload("a", times, np.ones(count, np.int64), np.ones(count, np.int64))
    scaled_workload = workload.scaled_to_rate(rate)
    assert scaled_workload.summary().rate == pytest.approx(rate)
    assert np.asarray(scaled_workload.arrivals) == pytest.approx(
        times * (scaled_workload.summary().span or 0) / times[-1]
    )


def test_workload_poisson_arrivals_have_rate_and_variation() -> None:
    ones = np.ones(200_000, np.int64)
    summary = Workload("a", None, ones, ones).with_poisson_arrivals(4.0, seed=1).summary()
    assert summary.rate == pytest.approx(4.0, rel=0.02)
    assert summary.variation == pytest.approx(1.0, rel=0.02)


def test_workload_draws_depend_on_seed_only() -> None:
    ones = np.arange(1, 100)
    workload = Workload("a", None, ones, ones)
    draws: tuple[Callable[[int], Workload], ...] = (
        lambda seed: workload.shuffled(seed),
        lambda seed: workload.resampled(seed),
        lambda seed: workload.with_poisson_arrivals(1.0, seed),
    )
    for draw in draws:
        assert draw(3).same_requests(draw(3))
        assert not draw(3).same_requests(draw(4))


@pytest.mark.parametrize("seed", [-1, 1.5, True, "1"])
def test_workload_refuses_non_integer_seed(seed: int) -> None:
    with pytest.raises(UsageError, match="a seed is a whole number from 0 on"):
        three_requests().shuffled(seed)


def test_workload_summary_of_three_requests() -> None:
    summary = three_requests().summary()
    assert (summary.count, summary.span, summary.rate) == (3, 4.0, 0.5)
    assert summary.variation == 0.5
    assert (summary.prompts.mean, summary.prompts.p50, summary.prompts.most) == (
        1634 / 3,
        600.0,
        1024,
    )
    assert summary.prompts.p95 == pytest.approx(600 + 0.9 * 424)
    assert summary.correlation == pytest.approx(np.corrcoef([600, 10, 1024], [3, 4, 5])[0, 1])
    assert summary.reuse == pytest.approx(2 / 5)


def test_workload_summary_uses_none_for_undefined_figures() -> None:
    summary = Workload("a", None, counts(5, 5), counts(1, 2)).summary()
    assert (summary.span, summary.rate, summary.variation) == (None, None, None)
    assert (summary.correlation, summary.reuse) == (None, None)
    burst_summary = Workload("a", np.zeros(2), counts(5, 5), counts(1, 2)).summary()
    assert (burst_summary.span, burst_summary.rate, burst_summary.variation) == (0.0, None, None)


@given(workloads())
def test_workload_arrays_are_read_only(workload: Workload) -> None:
    arrays = (workload.arrivals, workload.prompts, workload.outputs, *(workload.hashes or ()))
    assert not any(array.flags.writeable for array in arrays if array is not None)


def test_workload_leaves_callers_arrays_writable() -> None:
    prompts = counts(1, 2)
    Workload("a", None, prompts, counts(1, 1))
    assert prompts.flags.writeable


def test_workload_converts_integers_to_int64() -> None:
    narrow_arrays: tuple[Any, Any] = np.array([1, 2], np.uint8), np.array([3, 4], np.int32)
    workload = Workload("a", None, *narrow_arrays)
    assert workload.prompts.dtype == workload.outputs.dtype == np.int64
    assert rows_of(workload) == [(1, 3, ()), (2, 4, ())]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Workload("a", None, counts(1, 0), counts(1, 1)), "request 1: prompts are 1 to"),
        (lambda: Workload("a", None, counts(1), counts(-3)), "request 0: outputs are 1 to 2147483"),
        (lambda: Workload("a", None, counts(MAX_TOKENS + 1), counts(1)), "tokens, not 2147483648"),
        (lambda: Workload("a", None, counts(1, 2), counts(1)), "2 prompts and 1 outputs"),
        (lambda: Workload("a", None, counts(), counts()), "n >= 1, not int64 (0,)"),
        (
            lambda: Workload("a", None, FRACTIONS, counts(1, 1)),
            "are integers [n], n >= 1, not fl",
        ),
        (lambda: Workload("a", None, counts(1).reshape(1, 1), counts(1)), "not int64 (1, 1)"),
        (lambda: three_requests((0.0, 1.0)), "one for each request, not float64 (2,)"),
        (
            lambda: three_requests((0.0, 2.0, 1.0)),
            "request 2 arrives at 1.0, before the one before it",
        ),
        (lambda: three_requests((1.0, 2.0, 3.0)), "finite seconds from the first, which is 0"),
        (lambda: three_requests((0.0, 2.0, np.inf)), "finite seconds"),
        (lambda: three_requests((0.0, np.nan, 1.0)), "finite seconds"),
        (lambda: three_requests().first(4), "small has 3 requests: cannot take 4"),
        (lambda: three_requests().first(0), "cannot take 0"),
        (
            lambda: three_requests().scaled_to_rate(0.0),
            "a rate is above 0 requests per second, not 0.0",
        ),
        (lambda: three_requests().with_poisson_arrivals(np.nan, 0), "not nan"),
        (
            lambda: three_requests(None).scaled_to_rate(1.0),
            "small has no times that could be scaled",
        ),
        (
            lambda: three_requests((0.0, 0.0, 0.0)).scaled_to_rate(1.0),
            "has no times that could be scaled",
        ),
        (
            lambda: three_requests().first(1).scaled_to_rate(1.0),
            "has no times that could be scaled",
        ),
        (
            lambda: three_requests().resampled(0).block_hashes_of(0),
            "small has no hashes of prompts",
        ),
    ],
)
def test_workload_refuses_bad_arguments_in_one_line(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError) as error:
        make()
    assert words in str(error.value)
    assert "\n" not in str(error.value)
