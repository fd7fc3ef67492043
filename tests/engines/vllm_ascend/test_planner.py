"""Our policy in vllm-ascend's planner: handed out by its factory, checked by its own check."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm_ascend_cpu.faults import PLANS, Fault

pytestmark = pytest.mark.timeout(900)
Play = Callable[..., list[Any]]
Table = npt.NDArray[np.int64]
OURS = {"eplb_policy": True}
SHAPE = {"ranks": 4, "experts": 16, "redundant": 4}
STEEP = [[1000 // (place + 1) for place in range(16)], [7] * 16]


def slots_moved(before: Table, after: Table) -> int:
    """Slots whose expert changes."""
    return int((before != after).sum())


def fullest(load: list[int], table: Table) -> float:
    """Of one layer, max/mean of its ranks under an even split."""
    copies = np.bincount(table.ravel(), minlength=len(load))
    ranks = (np.array(load) / np.maximum(copies, 1))[table].sum(axis=1)
    return float(ranks.max() / ranks.mean())


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict[str, int], list[list[list[int]]]]:
    """A layout of vllm-ascend's, and loads of two layers in three cycles."""
    ranks = draw(st.integers(2, 5))
    slots = draw(st.integers(2, 5))
    experts = draw(st.integers(max(slots, ranks), ranks * slots))
    layer = st.lists(st.integers(0, 10**6), min_size=experts, max_size=experts)
    loads = draw(st.lists(st.lists(layer, min_size=2, max_size=2), min_size=1, max_size=3))
    return {"ranks": ranks, "experts": experts, "redundant": ranks * slots - experts}, loads


@given(problems())
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_planner_accepts_plans_without_duplicate_expert_on_a_rank(
    play: Play, problem: tuple[dict[str, int], list[list[list[int]]]]
) -> None:
    shape, loads = problem
    (answer,) = play("planners:plan", 1, table=shape, loads=loads, parts=OURS)
    assert answer["said"] == [[]] * len(loads)
    assert answer["counted"]["eplb_policy_calls"] == len(loads)
    assert answer["counted"]["eplb_policy_failures"] == 0
    tables = [np.array(table) for table in answer["tables"]]
    assert answer["counted"]["eplb_policy_moved_slots"] == sum(map(slots_moved, tables, tables[1:]))
    for table in tables:
        assert (np.diff(np.sort(table, axis=2), axis=2) > 0).all()
        assert all(np.unique(layer).size == shape["experts"] for layer in table)


def test_planner_process_uses_policy_and_worker_counts_its_calls(
    play: Play,
) -> None:
    (answer,) = play(
        "planners:plan", 1, table=SHAPE, loads=[STEEP, STEEP], parts=OURS, where="there"
    )
    first, second, third = (np.array(table) for table in answer["tables"])
    assert answer["policies"] == ["AscendEplbPolicy", "Policy"]
    assert answer["counted"]["eplb_policy_calls"] == 2
    assert answer["counted"]["eplb_policy_moved_slots"] == slots_moved(first, second) > 0
    assert fullest(STEEP[0], second[0]) < fullest(STEEP[0], first[0])
    assert slots_moved(second, third) == 0


def test_planner_call_moves_no_more_slots_than_limit(play: Play) -> None:
    part = {"eplb_policy": {"max_move_fraction": 0.05}}
    (answer,) = play("planners:plan", 1, table=SHAPE, loads=[STEEP] * 3, parts=part)
    tables = [np.array(table) for table in answer["tables"]]
    assert all(slots_moved(*pair) <= tables[0].size * 0.05 for pair in pairwise(tables))
    assert slots_moved(tables[0], tables[-1]) > 0


def test_planner_uses_stock_policy_when_part_is_off(play: Play) -> None:
    (answer,) = play("planners:plan", 1, table=SHAPE, loads=[STEEP], parts={})
    assert answer["policies"] == ["SwiftBalanceEplb", "DefaultEplbPolicy"]
    assert set(answer["counted"].values()) == {0}


def test_worker_shutdown_restores_stock_policies(play: Play) -> None:
    assert play("planners:after", 1) == [["SwiftBalanceEplb", "DefaultEplbPolicy"]]


@pytest.mark.parametrize("fault", PLANS)
def test_planner_check_rejects_planted_plan_faults(play: Play, fault: Fault) -> None:
    (answer,) = play("planners:plan", 1, table=SHAPE, loads=[STEEP], parts=OURS, fault=fault)
    assert len(answer["said"][0]) == 2
    assert answer["tables"][0] == answer["tables"][1]


def test_planner_process_survives_failing_policy_and_counts_it(play: Play) -> None:
    (answer,) = play(
        "planners:plan", 1, table=SHAPE, loads=[STEEP] * 2, parts=OURS, fault=Fault.FAILING_POLICY
    )
    assert answer["tables"][0] == answer["tables"][1] == answer["tables"][2]
    assert answer["said"] == [[], []]
    assert answer["counted"]["eplb_policy_failures"] == 2
