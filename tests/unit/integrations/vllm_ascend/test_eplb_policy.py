"""Our policy with vllm-ascend's interface: its planner accepts plans, few moves, no exceptions."""

from multiprocessing import get_context
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from helpers.references import ascend_layouts as layouts
from hypothesis import given
from hypothesis import strategies as st

from equipoise.hal.errors import PlacementError
from equipoise.integrations.vllm.settings import EplbPolicySettings
from equipoise.integrations.vllm_ascend.eplb_policy import AscendEplbPolicy, SharedCounters

Ints = layouts.Ints


def policy(**settings: float) -> tuple[AscendEplbPolicy, SharedCounters]:
    counters = SharedCounters()
    return AscendEplbPolicy(EplbPolicySettings(**settings), counters), counters


def by_slot(load: Ints, table: Ints) -> npt.NDArray[np.float64]:
    """(layers, ranks, slots of a rank), what each slot takes under an even split."""
    flat = table.reshape(len(table), -1)
    copies = np.stack([np.bincount(layer, minlength=load.shape[1]) for layer in flat])
    slot_loads: npt.NDArray[np.float64] = np.take_along_axis(load / copies, flat, axis=1)
    return slot_loads.reshape(table.shape)


def fullest(load: Ints, table: Ints) -> npt.NDArray[np.float64]:
    """(layers,), tokens of the fullest rank."""
    maximum_loads: npt.NDArray[np.float64] = by_slot(load, table).sum(axis=2).max(axis=1)
    return maximum_loads


def rebalance(load: Ints, table: Ints, **settings: float) -> tuple[int, Ints, Ints, dict[str, int]]:
    ours, counters = policy(**settings)
    work = torch.from_numpy(by_slot(load, table))
    has_changed, order, new = ours.rebalance_experts(torch.from_numpy(table), work)
    return has_changed, order, np.asarray(new), dict(counters.read())


def check_plan(before: Ints, after: Ints) -> None:
    """The checks of vllm-ascend's `check_expert_placement`."""
    for old, new in zip(before, after, strict=True):
        assert np.unique(new).size == np.unique(old).size
        for old_rank, new_rank in zip(old, new, strict=True):
            assert np.unique(new_rank).size == new_rank.size
            stays = np.isin(new_rank, old_rank)
            assert (new_rank[stays] == old_rank[stays]).all()


@st.composite
def problems(draw: st.DrawFn) -> tuple[Ints, Ints]:
    """A load, and a table in which no rank has an expert twice."""
    ranks, size = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    experts = draw(st.integers(size, ranks * size))
    layers = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    extra = [np.arange(place, place + ranks * size) % experts for place in range(layers)]
    table = np.stack(extra).reshape(layers, ranks, size)
    return rng.integers(0, 10 ** draw(st.integers(0, 9)), (layers, experts)), table


@given(problems(), st.floats(0, 1, exclude_min=True))
def test_policy_plan_is_accepted_bounded_and_never_worsens_a_layer(
    problem: tuple[Ints, Ints], most: float
) -> None:
    load, table = problem
    has_changed, order, new, counts = rebalance(load, table, max_move_fraction=most)
    check_plan(table, new)
    moves = int((new != table).sum())
    assert moves <= most * table.size
    assert counts == {
        "eplb_policy_calls": 1,
        "eplb_policy_moved_slots": moves,
        "eplb_policy_failures": 0,
    }
    assert has_changed == int(moves > 0)
    assert sorted(order.tolist()) == list(range(len(table)))
    assert (fullest(load, new) <= fullest(load, table) * (1 + 1e-9)).all()


def test_policy_balances_benchmark_layout_and_then_moves_nothing() -> None:
    load, table = layouts.zipf(np.random.default_rng(0), 0.8), layouts.first_layout()
    _, _, new_table, _ = rebalance(load, table)
    assert layouts.score(load, new_table).mean() <= 1.05
    assert rebalance(load, new_table)[3]["eplb_policy_moved_slots"] == 0


@pytest.mark.parametrize(
    ("table", "work"),
    [
        ([[[0, -1]]], [[[1, 1]]]),
        ([[[0, 2]]], [[[1, 1]]]),
        ([[[0, 1]]], [[[1, float("nan")]]]),
        ([[[0, 1]]], [[[1, 1, 1]]]),
    ],
)
def test_policy_keeps_table_and_counts_failure_for_invalid_input(table: Any, work: Any) -> None:
    ours, counters = policy()
    has_changed, order, new_table = ours.rebalance_experts(torch.tensor(table), torch.tensor(work))
    assert (has_changed, order.tolist(), new_table.tolist()) == (0, [0], table)
    assert dict(counters.read()) == {
        "eplb_policy_calls": 1,
        "eplb_policy_moved_slots": 0,
        "eplb_policy_failures": 1,
    }


def test_policy_refuses_change_of_group_size() -> None:
    with pytest.raises(PlacementError, match="a group that changes to 64 ranks"):
        policy()[0].set_new_ep_size(64)


def test_tally_counts_of_forked_process_are_visible() -> None:
    counters = SharedCounters()
    process = get_context("fork").Process(target=counters.add, args=("eplb_policy_moved_slots", 7))
    process.start()
    process.join(30)
    assert counters.read()["eplb_policy_moved_slots"] == 7
    with pytest.raises(KeyError):
        counters.add("rebalances")
