"""vLLM's calls: the policy with and without an old placement, and its two helpers."""

import numpy as np
import pytest
import torch
from helpers.strategies.placement_problems import Problem, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.compat.vllm import (
    EplbPolicy,
    compute_logical_maps,
    preserve_intragpu_slots,
    rebalance_experts,
)
from equipoise.hal.errors import PlacementError

UNHURRIED = settings(deadline=None)


def drifting_counts(seed: int, by: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts of 6 layers of 64 experts, float32 as the engine has them, and a window later."""
    rng = np.random.default_rng(seed)
    odds = rng.standard_normal((6, 64))
    later = odds + by * rng.standard_normal((6, 64))
    windows = [torch.from_numpy(rng.poisson(5000 * np.exp(o))).float() for o in (odds, later)]
    return windows[0], windows[1]


def copied_slots(old: torch.Tensor, new: torch.Tensor, ranks: int) -> int:
    """Slots whose expert their rank did not have."""
    before, after = (t.reshape(t.shape[0], ranks, -1) for t in (old, new))
    return int((~(after[..., :, None] == before[..., None, :]).any(dim=-1)).sum())


def test_policy_keeps_level_old_placement() -> None:
    weight, _ = drifting_counts(1, 0.0)
    old = EplbPolicy.rebalance_experts(weight, 72, 8, 2, 8)
    assert (old.dtype, old.device.type, tuple(old.shape)) == (torch.int64, "cpu", (6, 72))
    assert torch.equal(rebalance_experts(weight, 72, 8, 2, 8, old), old)


def test_policy_moves_few_slots_after_load_drift() -> None:
    weight, later = drifting_counts(2, 0.2)
    old = rebalance_experts(weight, 72, 1, 1, 8)
    new = rebalance_experts(later, 72, 1, 1, 8, old)
    anew = rebalance_experts(later, 72, 1, 1, 8, old, policy="greedy")
    assert 0 < copied_slots(old, new, 8) < copied_slots(old, anew, 8) / 3


@pytest.mark.parametrize("width", [64, 80])
def test_policy_plans_anew_when_group_size_changes(width: int) -> None:
    weight, _ = drifting_counts(3, 0.0)
    old = torch.arange(width).remainder(64).repeat(6, 1)
    expected = rebalance_experts(weight, 72, 1, 1, 8)
    assert torch.equal(rebalance_experts(weight, 72, 1, 1, 8, old), expected)


def test_policy_fills_empty_slots_and_keeps_the_others() -> None:
    weight, _ = drifting_counts(4, 0.0)
    full_placement = rebalance_experts(weight, 72, 1, 1, 8)
    old = full_placement.clone()
    old[:, 63:] = -1
    new = rebalance_experts(weight, 72, 1, 1, 8, old)
    assert torch.equal(new[:, :63], old[:, :63])


@UNHURRIED
@given(problems(), st.randoms(use_true_random=False))
def test_preserve_intragpu_slots_keeps_slots_within_a_rank(
    problem: Problem, random: object
) -> None:
    rng = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]
    shape = (2, problem.slots)
    old, new = (rng.integers(-1, problem.experts, shape) for _ in range(2))
    result = preserve_intragpu_slots(new, problem.ranks, old)
    size = problem.slots // problem.ranks
    for layer in range(2):
        for first in range(0, problem.slots, size):
            old_row, new_row, result_row = (
                m[layer, first : first + size].tolist() for m in (old, new, result)
            )
            assert sorted(result_row) == sorted(new_row)
            stay = sum(a == b for a, b in zip(old_row, result_row, strict=True))
            assert stay == sum(min(old_row.count(e), new_row.count(e)) for e in set(new_row))


def test_preserve_intragpu_slots_returns_incomparable_maps_unchanged() -> None:
    new = np.array([[0, 1, 2]])
    assert preserve_intragpu_slots(new, 2, new) is new
    assert preserve_intragpu_slots(new, 3, np.array([[0, 1]])) is new


def test_preserve_intragpu_slots_fills_free_slots_in_order() -> None:
    result = preserve_intragpu_slots(np.array([[4, 1, 5, 2]]), 1, np.array([[1, 7, 2, 8]]))
    assert result.tolist() == [[1, 4, 2, 5]]


def test_compute_logical_maps_skips_empty_slots_and_keeps_dtype() -> None:
    placement = torch.tensor([[2, 0, -1, 2], [0, 0, 0, 1]], dtype=torch.int32)
    slots, counts = compute_logical_maps(placement, 3)
    assert slots.dtype == counts.dtype == torch.int32
    assert counts.tolist() == [[1, 0, 2], [3, 1, 0]]
    first = [[1, -1, -1], [-1, -1, -1], [0, 3, -1]]
    assert slots.tolist() == [first, [[0, 1, 2], [3, -1, -1], [-1, -1, -1]]]


def test_compute_logical_maps_of_one_layer_has_no_layer_axis() -> None:
    slots, counts = compute_logical_maps(torch.tensor([1, 0, 1]), 2)
    assert slots.tolist() == [[1, -1], [0, 2]]
    assert counts.tolist() == [1, 2]


def test_compute_logical_maps_refuses_bad_placement_in_one_line() -> None:
    with pytest.raises(PlacementError, match=r"expert 5 is outside \[0, 3\)"):
        compute_logical_maps(torch.tensor([[0, 5]]), 3)
    with pytest.raises(PlacementError, match=r"expected \(layers, slots\) on the CPU"):
        compute_logical_maps(torch.zeros((1, 1, 1), dtype=torch.int64), 3)
