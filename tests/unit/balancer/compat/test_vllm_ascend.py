"""vllm-ascend's call: what its worker accepts, and few moves to level ranks."""

import numpy as np
import pytest
import torch
from helpers.references import ascend_layouts as layouts

from equipoise.compat.vllm_ascend import EplbPolicy, rebalance_experts
from equipoise.hal.errors import PlacementError

Ints = layouts.Ints


def rebalanced_table(load: Ints, table: Ints) -> Ints:
    change_flag, _, new_rows = rebalance_experts(
        torch.from_numpy(table), torch.from_numpy(layouts.workload(load, table))
    )
    new_table = np.array(new_rows, dtype=np.int64)
    assert change_flag == int((new_table != table).any())
    check_accepted_by_worker(table, new_table)
    return new_table


def check_accepted_by_worker(before: Ints, after: Ints) -> None:
    """Checks what the engine's worker checks before it accepts a new table."""
    for old, new in zip(before, after, strict=True):
        assert np.unique(new).size == np.unique(old).size
        for old_rank, new_rank in zip(old, new, strict=True):
            assert np.unique(new_rank).size == new_rank.size
            stays = np.isin(new_rank, old_rank)
            assert (new_rank[stays] == old_rank[stays]).all()


@pytest.mark.parametrize("seed", range(5))
def test_policy_levels_first_layout_with_fewer_moves_than_default(seed: int) -> None:
    rng = np.random.default_rng(seed)
    load, table = layouts.log_normal(rng, 0.02), layouts.first_layout()
    assert layouts.score(load, table).mean() == pytest.approx(1.14, abs=0.02)
    new_table = rebalanced_table(load, table)
    assert layouts.score(load, new_table).mean() <= 1.02
    assert layouts.moves(table, new_table) <= 3700


@pytest.mark.parametrize("seed", range(5))
def test_policy_levels_mixed_layout_and_separates_duplicates(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = layouts.mixed_layout(rng)
    load = layouts.log_normal(rng, 0.05)
    assert layouts.score(load, table).mean() == pytest.approx(1.14, abs=0.02)
    change_flag, _, new_rows = rebalance_experts(table, layouts.workload(load, table))
    new_table = np.array(new_rows, dtype=np.int64)
    assert change_flag == 1
    assert (np.diff(np.sort(new_table, axis=2), axis=2) > 0).all()
    assert layouts.score(load, new_table).mean() <= 1.02
    assert layouts.moves(table, new_table) <= 3700


def test_policy_levels_zipf_load_and_then_moves_nothing() -> None:
    load, table = layouts.zipf(np.random.default_rng(0), 0.8), layouts.first_layout()
    new_table = rebalanced_table(load, table)
    assert layouts.score(load, new_table).mean() <= 1.02
    assert (rebalanced_table(load, new_table) == new_table).all()


def test_policy_orders_layers_by_gain() -> None:
    table = np.array([[[0, 1], [2, 3]]] * 3)
    work = np.array([[[5, 5], [5, 5]], [[9, 9], [1, 1]], [[6, 6], [4, 4]]])
    change_flag, priority, new = rebalance_experts(table, work)
    assert (change_flag, priority.tolist()) == (1, [1, 2, 0])
    assert new[0] == table[0].tolist()
    assert isinstance(new[1][0][0], int)


def test_policy_sums_stages_and_ignores_unknown_counts() -> None:
    table = np.array([[[0, 1], [2, 0]]])
    stages = np.array([[[[4, 0], [1, -1]]], [[[4, -1], [1, 2]]]])
    stage_sums = np.array([[[8, 0], [2, 2]]])
    assert rebalance_experts(table, stages)[2] == rebalance_experts(table, stage_sums)[2]


def test_policy_moves_nothing_without_counts() -> None:
    table = np.array([[[0, 1], [2, 0]]])
    change_flag, priority, new = EplbPolicy().rebalance_experts(table, np.zeros((1, 2, 2)))
    assert (change_flag, priority.tolist(), new) == (0, [0], table.tolist())


def test_set_new_ep_size_is_refused_in_one_line() -> None:
    with pytest.raises(PlacementError, match="a group that changes to 64 ranks is not planned"):
        EplbPolicy().set_new_ep_size(64)


@pytest.mark.parametrize(
    ("table", "workload", "message"),
    [
        ([[0, 1]], [[1, 1]], "must be .layers, ranks, slots of a rank., got .1, 2."),
        ([[[0, 1]]], [[[1, 1, 1]]], r"expert_workload must be numbers \(1, 1, 2\)"),
        ([[[0, 2, 2]]], [[[1, 1, 1]]], r"no slot for expert\(s\) \[1\]"),
        ([[[0, 1]]], [[[1, -2]]], r"expert_workload\[0, 0, 1\] is -2, which is no count"),
        ([[[0.0, 1.0]]], [[[1, 1]]], "current_expert_table must be integers"),
    ],
)
def test_policy_refuses_bad_arguments_in_one_line(
    table: object, workload: object, message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        rebalance_experts(np.array(table), np.array(workload))
