"""Which router is called best, and which cannot be told from it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.requests.policy_comparison import Interval, PolicyResult
from equipoise.balancer.requests.simulation_run import SimulationMetrics
from equipoise.report.simulation.columns import (
    BY_FIGURE,
    COLUMNS,
    Better,
    best_of_columns,
    indistinguishable_lines,
    paired_difference,
)
from equipoise.report.simulation.result import SimulationResult

MakeResult = Callable[..., PolicyResult]


def test_judge_prefers_low_imbalance_and_high_throughput(make_result: MakeResult) -> None:
    for figure, winner in (("imbalance", "low"), ("throughput", "high")):
        low = make_result("low", figure, (1.0, 1.1, 1.2))
        high = make_result("high", figure, (2.0, 2.1, 2.2))
        [best] = best_of_columns((low, high))
        assert (best.column.figure, best.best, best.indistinguishable) == (figure, winner, ())


def test_policies_are_indistinguishable_when_paired_interval_has_zero(
    make_result: MakeResult,
) -> None:
    steady = make_result("steady", "idle", (0.2, 0.3, 0.4))
    # Its mean is lower, but now it is above and now below; each seed alone tells the others apart.
    shaky = make_result("shaky", "idle", (0.25, 0.1, 0.45))
    behind = make_result("behind", "idle", (0.31, 0.4, 0.5))
    [best] = best_of_columns((steady, shaky, behind))
    assert (best.best, best.indistinguishable) == ("shaky", ("steady", "behind"))
    [best] = best_of_columns((steady, behind))
    assert (best.best, best.indistinguishable) == ("steady", ())


def test_judge_separates_policies_by_paired_seeds(make_result: MakeResult) -> None:
    slow = make_result("slow", "throughput", (100.0, 200.0, 300.0))
    fast = make_result("fast", "throughput", (101.0, 201.0, 301.1))
    assert fast.interval("throughput").low < slow.interval("throughput").high
    assert paired_difference(fast, slow, "throughput").low > 0
    assert best_of_columns((slow, fast))[0].indistinguishable == ()


def test_judge_has_no_best_for_equal_or_missing_figures(make_result: MakeResult) -> None:
    equal = (make_result("a", "idle", (1.0, 1.0)), make_result("b", "idle", (1.0, 1.0)))
    nothing = (make_result("a", "idle", (float("nan"),)), make_result("b", "idle", (1.0,)))
    assert best_of_columns(equal) == best_of_columns(nothing) == best_of_columns(equal[:1]) == ()


def test_best_of_one_seed_has_no_indistinguishable_policy(
    make_result: MakeResult,
) -> None:
    [best] = best_of_columns((make_result("a", "idle", (1.0,)), make_result("b", "idle", (2.0,))))
    assert (best.best, best.indistinguishable) == ("a", ())


def test_tie_lines_list_indistinguishable_policies_by_column(
    simulation_result: SimulationResult, make_result: MakeResult
) -> None:
    def lines(*results: PolicyResult) -> list[str]:
        return list(
            indistinguishable_lines(
                replace(simulation_result, results=results), best_of_columns(results)
            )
        )

    one, two = make_result("a", "idle", (1.0, 2.0)), make_result("b", "idle", (1.1, 1.8))
    far = make_result("c", "idle", (9.0, 10.0))
    assert lines(one, two)[0].endswith("(paired by seed, 95 %): idle")
    assert lines(one, two, far)[1] == "  idle: a"
    assert lines(one, far)[0].startswith("every policy can be told from the best")
    assert lines(one) == ["one policy: no best"]
    assert lines(one, one) == ["no policy is better than another at anything"]


@given(mean=st.floats(1e-6, 1e12), half=st.floats(0, 1e6))
def test_column_cell_is_rounded_mean(mean: float, half: float) -> None:
    column = BY_FIGURE["throughput"]
    for decimals in (0, 4):
        cell_text = column.cell(Interval(mean, half), decimals)
        value = float(cell_text.split(" ")[0].replace(",", ""))
        assert value == pytest.approx(mean, rel=1e-12, abs=0.51 * 10**-decimals)


@pytest.mark.parametrize(
    ("values", "decimals"), [((197.0, 23.0), 0), ((15.8, 1.9), 1), ((0.4,), 3), ((0.0,), 0)]
)
def test_column_decimals_follow_largest_and_smallest_value(
    make_result: MakeResult, values: tuple[float, ...], decimals: int
) -> None:
    results = [make_result(str(n), "ttft_mean", (value,)) for n, value in enumerate(values)]
    assert BY_FIGURE["ttft_mean"].decimals(results) == decimals


def test_column_shows_short_times_in_milliseconds(make_result: MakeResult) -> None:
    column = BY_FIGURE["wait_p99"]
    short = column.fitted([make_result("a", "wait_p99", (0.02,))])
    assert (short.unit, short.scale) == ("ms", 1e3)
    for values in ((0.02,), (3.0,)), ((0.0,), (0.0,)), ((float("nan"),), (float("nan"),)):
        results = [make_result("ab"[n], "wait_p99", v) for n, v in enumerate(values)]
        assert column.fitted(results) is column
    assert BY_FIGURE["idle"].fitted([make_result("a", "idle", (0.02,))]) is BY_FIGURE["idle"]


def test_columns_are_figures_and_bounds_have_no_best() -> None:
    assert {column.figure for column in COLUMNS} == set(SimulationMetrics.names()) - {
        "preempted",
        "steps",
    }
    neither = {column.figure for column in COLUMNS if column.better is Better.NEITHER}
    assert neither == {"bound", "occupancy"}
