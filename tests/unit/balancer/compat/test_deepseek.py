"""DeepSeek's call: types, maps that agree, and what is taken for a count."""

import numpy as np
import pytest
import torch
from helpers.references.published_placement_rule import published
from helpers.strategies.placement_problems import Problem, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.compat.deepseek import rebalance_experts
from equipoise.hal.errors import PlacementError

UNHURRIED = settings(deadline=None)
WEIGHT = [[30, 7, 0, 12, 55, 18], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]


@UNHURRIED
@given(problems(), st.sampled_from(["best", "connected", "greedy"]))
def test_rebalance_experts_returns_three_consistent_maps(problem: Problem, policy: str) -> None:
    weight = torch.from_numpy(problem.load)
    phy2log, log2phy, logcnt = rebalance_experts(
        weight, problem.slots, 1, 1, problem.ranks, policy=policy
    )
    layers = len(problem.load)
    assert phy2log.shape == (layers, problem.slots)
    assert log2phy.shape == (layers, problem.experts, int(logcnt.max()))
    assert {t.dtype for t in (phy2log, log2phy, logcnt)} == {torch.int64}
    for layer in range(layers):
        for expert in range(problem.experts):
            slots = (phy2log[layer] == expert).nonzero().flatten().tolist()
            padding = [-1] * (log2phy.shape[2] - len(slots))
            assert log2phy[layer, expert].tolist() == slots + padding
            assert logcnt[layer, expert] == len(slots) > 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float64, torch.bfloat16])
def test_rebalance_experts_ignores_dtype_of_weights(dtype: torch.dtype) -> None:
    counts = torch.tensor(WEIGHT)
    expected = rebalance_experts(counts, 8, 3, 2, 4)
    for weight in (counts.to(dtype), counts.to(dtype).float().numpy(), WEIGHT):
        for actual_map, expected_map in zip(
            rebalance_experts(weight, 8, 3, 2, 4), expected, strict=True
        ):
            assert torch.equal(actual_map, expected_map)


@pytest.mark.parametrize("scale", [2.0**-60, 2.0**-3, 2.0**60])
def test_rebalance_experts_ignores_scale_of_weights(scale: float) -> None:
    weight = torch.rand((4, 12), generator=torch.Generator().manual_seed(3))
    expected = rebalance_experts(weight, 16, 1, 1, 8)[0]
    assert torch.equal(rebalance_experts(weight * scale, 16, 1, 1, 8)[0], expected)


def test_greedy_policy_equals_published_rule() -> None:
    load = np.array(WEIGHT)
    placement = rebalance_experts(load, 9, 1, 1, 3, policy="greedy")[0]
    assert placement.tolist() == published(load, 9, 3).tolist()


def test_rebalance_experts_on_one_rank_without_spare_slots() -> None:
    phy2log, log2phy, logcnt = rebalance_experts(torch.tensor(WEIGHT), 6, 1, 1, 1)
    assert phy2log.sort(dim=1).values.tolist() == [list(range(6))] * 3
    assert log2phy.shape == (3, 6, 1)
    assert set(logcnt.flatten().tolist()) == {1}


def test_rebalance_experts_keeps_installed_map_when_ranks_are_level() -> None:
    weight = torch.rand((3, 24), generator=torch.Generator().manual_seed(1))
    now = rebalance_experts(weight, 32, 1, 1, 4)[0]
    assert torch.equal(rebalance_experts(weight, 32, 1, 1, 4, installed=now)[0], now)


@pytest.mark.parametrize(
    ("weight", "numbers", "message"),
    [
        ([1.0, 2.0], (2, 1, 1, 1), r"weight must be \(layers, experts\).*got \(2,\)"),
        ([[1.0, float("nan")]], (2, 1, 1, 1), r"weight\[0, 1\] is nan, which is no count"),
        ([[1, 2], [3, -4]], (2, 1, 1, 1), r"weight\[1, 1\] is -4, which is no count"),
        ([[True, False]], (2, 1, 1, 1), "weight must be numbers, got bool"),
        ([[1, 2, 3, 4]], (4, 3, 1, 1), "4 experts do not divide into 3 groups"),
        ([[1, 2, 3, 4]], (4, 6, 2, 2), "4 experts do not divide into 6 groups"),
        ([[1, 2, 3, 4]], (4, 0, 2, 2), "4 experts do not divide into 0 groups"),
        ([[1, 2, 3, 4]], (5, 1, 1, 2), "5 slots do not divide among 2 ranks"),
        ([[1, 2, 3, 4]], (3, 1, 1, 1), "3 slots cannot hold 4 experts"),
        ([[1, 2], [3]], (2, 1, 1, 1), "expected an array"),
    ],
)
def test_rebalance_experts_refuses_bad_arguments_in_one_line(
    weight: list[list[float]], numbers: tuple[int, int, int, int], message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        rebalance_experts(weight, *numbers)


@pytest.mark.parametrize(("groups", "nodes"), [(3, 2), (1, 2), (7, 4), (5, 2)])
def test_rebalance_experts_takes_groups_that_do_not_divide_among_nodes(
    groups: int, nodes: int
) -> None:
    """The original looks at groups only where they do, and plans without them elsewhere."""
    load = [[90, 132, 40, 61, 104, 165, 39, 4]]
    grouped = rebalance_experts(load, 16, groups, nodes, 4)
    ungrouped = rebalance_experts(load, 16, 1, 1, 4)
    assert [part.tolist() for part in grouped] == [part.tolist() for part in ungrouped]
