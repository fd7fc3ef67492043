"""The exchange of fixed capacity among processes: clauses G6, G9, S3 and the order of rows."""

from dataclasses import asdict, replace

import pytest
from exploration.exchange import oracle
from exploration.exchange.case import PLAIN, Case, Grid
from exploration.exchange.strategies import cases
from helpers.processes.rank_pool import Ranks
from helpers.rank_programs import fixed_exchange
from helpers.rank_programs.tensor_patterns import same
from helpers.strategies.hypothesis_examples import few
from hypothesis import given, note
from hypothesis import strategies as st

FEW = few(30)


def verdicts(ranks: Ranks, case: Case, where: str = "host") -> list[list[str]]:
    answers = ranks.run(fixed_exchange.round_trips, case.size, given=asdict(case), where=where)
    assert [answer["wrong"] for answer in answers] == [{}] * case.size
    return [answer["verdicts"] for rank, answer in enumerate(answers) if rank in case.ranks]


@FEW
@given(cases(), st.sampled_from(["host", "stream"]))
def test_fixed_exchange_round_trip_matches_dense_reference(
    ranks: Ranks, case: Case, where: str
) -> None:
    note(repr(case))
    verdicts_by_rank = verdicts(ranks, case, where)
    assert all(len(one) == len(case.steps) for one in verdicts_by_rank)


EXTREMES: dict[str, list[Grid]] = {
    "no tokens anywhere": [[], [], []],
    "tokens on one rank only": [[], [[0, 3], [5, 1]], []],
    "everything to one slot": [[[4, 4]] * 5, [[4, 4]] * 2, [[4, 4]]],
    "nothing but padding": [[[6, 6]], [[7, 6]], [[6, -9]]],
    "everything to oneself": [[[0, 1]], [[2, 3]], [[4, 5]]],
    "both choices to one rank": [[[0, 1], [3, 2]], [[5, 4], [1, 0]], [[2, 3]]],
}


@pytest.mark.parametrize("grids", EXTREMES.values(), ids=EXTREMES.keys())
def test_fixed_exchange_ample_format_fits_lopsided_batches(ranks: Ranks, grids: list[Grid]) -> None:
    case = replace(PLAIN, steps=[[grids, grids[::-1]]] * 2)
    assert verdicts(ranks, case) == [["StepFitted(inactive_rank_hits=0)"] * 2] * 3


def test_fixed_exchange_fits_when_capacity_is_exactly_reached(ranks: Ranks) -> None:
    grids = [[[0, 1], [0, 6], [2, 3]], [[0, 0], [1, 6]], []]
    case = replace(PLAIN, capacity=2, result_capacity=3, steps=[[grids]])
    assert verdicts(ranks, case) == [["StepFitted(inactive_rank_hits=0)"]] * 3


def test_fixed_exchange_row_overflow_is_known_to_all_ranks(ranks: Ranks) -> None:
    full, empty = [[[0, 1], [0, 6], [1, 3]], [], []], [[[5, 5]], [], [[0, 0]]]
    case = replace(PLAIN, capacity=2, result_capacity=9, steps=[[full, empty], [empty], [full]])
    over = "StepOverflowed(rows_over=1, results_over=0)"
    assert verdicts(ranks, case) == [[over, "StepFitted(inactive_rank_hits=0)", over]] * 3


def test_fixed_exchange_result_overflow_is_known_to_all_ranks(ranks: Ranks) -> None:
    grids = [[], [[4, 5], [4, 4]], []]
    case = replace(PLAIN, result_capacity=3, steps=[[grids]])
    assert verdicts(ranks, case) == [["StepOverflowed(rows_over=0, results_over=1)"]] * 3


def test_fixed_exchange_generation_mismatch_is_known_to_all_ranks(ranks: Ranks) -> None:
    grids = [[[0, 1]], [[2, 3]], [[4, 5]]]
    case = replace(PLAIN, steps=[[grids, grids], [grids]], odd=[[0, 1, 2]])
    assert verdicts(ranks, case) == [["mismatch", "StepFitted(inactive_rank_hits=0)"]] * 3


@pytest.mark.parametrize("active", [[0, 2], [1], [2, 0, 1]])
def test_fixed_exchange_skips_inactive_ranks(ranks: Ranks, active: list[int]) -> None:
    grids = [[[0, 5], [2, 3]], [[2, 0], [4, 4]], [[3, 1]]]
    case = replace(PLAIN, steps=[[grids, grids]] * 2, active=active)
    counts = {(0, 2): [4, 2], (1,): [6], (2, 0, 1): [0, 0, 0]}[tuple(active)]
    assert verdicts(ranks, case) == [
        [f"StepFitted(inactive_rank_hits={count})"] * 2 for count in counts
    ]


def test_fixed_exchange_replicas_give_identical_bits(ranks: Ranks) -> None:
    placement = [2, 0, 0, 1, 1, 2]
    first: list[Grid] = [[[1, 0], [3, 5]], [[0, 3]], [[2, 5], [5, 4]]]
    second: list[Grid] = [[[2, 5], [4, 0]], [[5, 4]], [[1, 0], [0, 3]]]
    outputs = []
    for grids in (first, second):
        case = replace(PLAIN, placement=placement, steps=[[grids]])
        assert verdicts(ranks, case) == [["StepFitted(inactive_rank_hits=0)"]] * 3
        outputs.append([oracle.dense(case, 0, 0, rank) for rank in range(3)])
    assert all(same(one, other) for one, other in zip(*outputs, strict=True))


def test_fixed_exchange_survivors_go_on_after_rank_is_killed(
    ranks: Ranks,
) -> None:
    grids = [[[0, 5], [2, 3]], [[2, 0]], [[3, 1], [4, 4]]]
    case = replace(PLAIN, steps=[[grids, grids]])
    answers = ranks.run(fixed_exchange.lose_a_rank, 3, lost=[1], given=asdict(case), victim=1)
    assert answers[1] is None
    for answer, stray in zip((answers[0], answers[2]), (4, 2), strict=True):
        assert answer["told"] in {"CommunicatorFailed", "OperationTimeout"}
        assert (answer["wrong"], answer["verdicts"]) == (
            {},
            [f"StepFitted(inactive_rank_hits={stray})"],
        )
