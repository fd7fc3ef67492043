"""Stages that compute in a pipeline: as one process would, with several micro-batches in flight."""

from typing import Any

import pytest
from helpers.processes.rank_pool import Ranks
from helpers.rank_programs import pipeline_stages as stages
from helpers.strategies.hypothesis_examples import few
from hypothesis import given
from hypothesis import strategies as st

FEW = few(20)
SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=12)


@FEW
@given(SIZES, st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_pipeline_samples_same_tokens_as_one_process(
    ranks: Ranks, sizes: list[int], count: int, in_flight: int, depth: int
) -> None:
    answers = ranks.run(
        stages.run_stages, count, sizes=sizes, in_flight=in_flight, depth=depth, parts=1, raises=[]
    )
    expected = stages.alone(count, sizes, in_flight)
    assert [answer["error"] for answer in answers] == [""] * count
    assert answers[0]["tokens"] == expected
    assert answers[-1]["tokens"] == expected
    assert all(set(answer["messages"]) <= {len(sizes)} for answer in answers)


@FEW
@given(SIZES, st.integers(1, 3), st.integers(1, 2))
def test_stage_that_forwards_received_tensors_keeps_tokens(
    ranks: Ranks, sizes: list[int], in_flight: int, depth: int
) -> None:
    options: dict[str, Any] = {
        "sizes": sizes,
        "in_flight": in_flight,
        "depth": depth,
        "parts": 1,
        "raises": [],
    }
    answers = ranks.run(stages.run_stages, 3, passing=[1], **options)
    assert [answer["error"] for answer in answers] == [""] * 3
    assert answers[0]["tokens"] == stages.alone(3, sizes, in_flight, [1])


@FEW
@given(SIZES, st.integers(1, 3))
def test_stages_of_two_ranks_hand_over_slices(
    ranks: Ranks, sizes: list[int], in_flight: int
) -> None:
    answers = ranks.run(
        stages.run_stages, 4, sizes=sizes, in_flight=in_flight, depth=2, parts=2, raises=[]
    )
    expected = stages.alone(2, sizes, in_flight)
    assert [answer["error"] for answer in answers] == [""] * 4
    assert [answer["tokens"] for answer in answers] == [expected] * 4


def test_middle_stage_gathers_and_compares_without_mixing(ranks: Ranks) -> None:
    """Each new number of rows is compared while rows of others are gathered."""
    sizes = list(range(1, 13))
    answers = ranks.run(stages.run_stages, 6, sizes=sizes, in_flight=3, depth=3, parts=2, raises=[])
    assert [answer["error"] for answer in answers] == [""] * 6
    assert [answer["tokens"] for answer in answers[:2]] == [stages.alone(3, sizes, 3)] * 2


@pytest.mark.parametrize("in_flight", [1, 3])
def test_stage_turn_begins_after_the_turn_it_depends_on(ranks: Ranks, in_flight: int) -> None:
    for answer in ranks.run(
        stages.run_stages, 2, sizes=[2] * 6, in_flight=in_flight, depth=3, parts=1, raises=[]
    ):
        calls = answer["calls"]
        assert [c for c in calls if "end" in c] == [f"end {n}" for n in range(6)]
        for number in range(6):
            begins = calls.index(f"begin {number}")
            assert calls[begins : begins + 3] == [
                f"{verb} {number}" for verb in ("begin", "enter", "leave")
            ]
            earlier_ends = [c for c in calls[:begins] if "end" in c]
            assert len(earlier_ends) == max(0, number + 1 - in_flight)


def test_stage_posts_token_receives_ahead_unless_serial(
    ranks: Ranks,
) -> None:
    sizes = [2] * 5
    ahead, _ = ranks.run(stages.receives_of_tokens, 2, sizes=sizes, serial=False)
    assert ahead == [0, 1, 2, 2, 2]
    late, _ = ranks.run(stages.receives_of_tokens, 2, sizes=sizes, serial=True)
    assert late == [0] * 5


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_failing_stage_ends_all_stages_and_alone_reports_cause(ranks: Ranks, stage: int) -> None:
    answers = ranks.run(
        stages.run_stages,
        3,
        deadline=3.0,
        sizes=[2] * 8,
        in_flight=3,
        depth=2,
        parts=1,
        raises=[stage, 3],
    )
    for rank, answer in enumerate(answers):
        assert answer["error"] != ""
        assert ("cannot" in answer["text"]) == (rank == stage)
    assert answers[stage]["error"] == "StreamFailed"
