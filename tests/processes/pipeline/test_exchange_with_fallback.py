"""Steps that do not fit run again on the portable exchange, on all ranks, and nothing is lost."""

from dataclasses import asdict, replace
from typing import Any

import pytest
from exploration.exchange import oracle
from exploration.exchange.case import PLAIN, Case, Grid
from exploration.exchange.strategies import cases
from helpers.processes.rank_pool import Ranks
from helpers.rank_programs import fixed_exchange
from helpers.strategies.hypothesis_examples import few
from hypothesis import given, note
from hypothesis import strategies as st

from equipoise.pipeline.all_to_all.fallback import ExchangeStatistics
from equipoise.pipeline.all_to_all.status import StepFitted, StepOverflowed

FEW = few(30)
TIGHT: list[Grid] = [[[0, 1], [0, 4], [1, 3]], [[5, 5], [2, 0]], []]
LOOSE: list[Grid] = [[[5, 5]], [], [[0, 0]]]


def tallies(ranks: Ranks, case: Case, where: str = "host") -> list[dict[str, Any]]:
    answers = ranks.run(fixed_exchange.sure_steps, case.size, given=asdict(case), where=where)
    assert [answer["wrong"] for answer in answers] == [[]] * case.size
    return [answers[rank]["tally"] for rank in case.ranks]


@FEW
@given(cases().map(lambda case: replace(case, odd=[])), st.sampled_from(["host", "stream"]))
def test_overflowing_step_is_rerun_and_matches_dense_reference(
    ranks: Ranks, case: Case, where: str
) -> None:
    note(repr(case))
    none = oracle.Excess(0, 0)
    over = sum(oracle.excess(case, step) != none for step in range(len(case.steps)))
    for tally in tallies(ranks, case, where):
        assert (tally["fitted"], tally["rerun"]) == (len(case.steps) - over, over)


@pytest.mark.parametrize(("capacity", "rerun"), [(1, 2), (2, 2), (3, 0)])
def test_row_overflow_on_one_rank_reruns_step_on_all_ranks(
    ranks: Ranks, capacity: int, rerun: int
) -> None:
    case = replace(
        PLAIN,
        capacity=capacity,
        result_capacity=6,
        steps=[[TIGHT, LOOSE], [LOOSE], [LOOSE, TIGHT, LOOSE]],
    )
    expected = ExchangeStatistics(3 - rerun, rerun, max_rows_over=3 - capacity, max_results_over=0)
    assert tallies(ranks, case) == [asdict(expected)] * 3


def test_overflow_rerun_runs_among_active_ranks_only(ranks: Ranks) -> None:
    case = replace(PLAIN, capacity=2, result_capacity=9, steps=[[TIGHT], [LOOSE]], active=[2, 0])
    assert [t["rerun"] for t in tallies(ranks, case)] == [1, 1]


def test_generation_mismatch_raises_on_every_rank_without_rerun(
    ranks: Ranks,
) -> None:
    case = replace(PLAIN, capacity=1, result_capacity=9, odd=[[1, 0, 2]])
    case = replace(case, steps=[[LOOSE], [TIGHT], [TIGHT]])
    reports = ranks.run(fixed_exchange.mismatched_step, 3, given=asdict(case))
    others = "rank 2 dispatched with generation 141, this rank with 41"
    mine = "rank 1 dispatched with generation 41, this rank with 141"
    assert [one[0] for one in reports] == [one[2] for one in reports] == ["ran"] * 3
    assert [reports[0][1], reports[1][1]] == [others] * 2
    assert reports[2][1] in {mine, mine.replace("rank 1", "rank 0")}


def test_overflow_counter_adds_verdicts_and_keeps_maxima() -> None:
    tally = ExchangeStatistics()
    for verdict in (StepFitted(2), StepOverflowed(3, 1), StepOverflowed(1, 4), StepFitted(1)):
        tally = tally.with_step(verdict)
    assert tally == ExchangeStatistics(
        fitted=2, rerun=2, max_rows_over=3, max_results_over=4, inactive_rank_hits=3
    )
