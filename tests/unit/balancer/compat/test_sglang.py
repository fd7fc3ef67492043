"""SGLang's dispatcher: types and widths by algorithm."""

from enum import Enum, auto

import pytest
import torch

from equipoise.compat.sglang import rebalance_experts
from equipoise.hal.errors import PlacementError


class EplbAlgorithm(Enum):
    """The members of the engine's enum that the policy reads."""

    deepseek = auto()
    deepseek_hierarchical = auto()
    deepseek_vec = auto()
    deepseek_vec_hierarchical = auto()
    elasticity_aware = auto()


def steps() -> torch.Tensor:
    return torch.randint(0, 900, (5, 3, 16), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(
    ("algorithm", "first", "other", "width"),
    [
        (EplbAlgorithm.deepseek, torch.int64, torch.int64, None),
        (EplbAlgorithm.deepseek_hierarchical, torch.int64, torch.int64, None),
        (EplbAlgorithm.deepseek_vec, torch.int32, torch.int32, 9),
        (EplbAlgorithm.deepseek_vec_hierarchical, torch.int64, torch.int32, 9),
    ],
)
def test_rebalance_experts_dtypes_and_widths_per_algorithm(
    algorithm: EplbAlgorithm, first: torch.dtype, other: torch.dtype, width: int | None
) -> None:
    for algorithm_or_name in (algorithm, algorithm.name):
        placement, slots, counts = rebalance_experts(steps(), 24, 6, 4, 2, algorithm_or_name)
        assert (placement.dtype, slots.dtype, counts.dtype) == (first, other, other)
        assert placement.shape == (3, 24)
        assert slots.shape == (3, 16, width or int(counts.max()))
        assert counts.sum(dim=1).tolist() == [24] * 3
        for layer, expert in torch.cartesian_prod(torch.arange(3), torch.arange(16)).tolist():
            replica_slots = slots[layer, expert][slots[layer, expert] >= 0]
            assert len(replica_slots) == counts[layer, expert] > 0
            assert (placement[layer, replica_slots.long()] == expert).all()


def test_rebalance_experts_sums_steps() -> None:
    step_counts = steps()
    total_counts = step_counts.sum(dim=0, keepdim=True)
    expected = rebalance_experts(total_counts, 24, 6, None, 1, "deepseek")
    for actual_map, expected_map in zip(
        rebalance_experts(step_counts.float(), 24, 6, None, 1, "deepseek"), expected, strict=True
    ):
        assert torch.equal(actual_map, expected_map)


def test_rebalance_experts_keeps_installed_map_when_ranks_are_level() -> None:
    now = rebalance_experts(steps() + 500, 24, 6, None, 1, "deepseek")[0]
    again = rebalance_experts(steps() + 500, 24, 6, None, 1, "deepseek", installed=now)[0]
    assert torch.equal(again, now)


@pytest.mark.parametrize(
    ("tokens", "sizes", "algorithm", "message"),
    [
        (steps(), (24, 6), EplbAlgorithm.elasticity_aware, "got 'elasticity_aware'"),
        (steps()[0], (24, 6), "deepseek", r"must be \(steps, layers, experts\)"),
        (steps(), (24, 5), "deepseek", "24 slots do not divide into ranks of 5"),
        (steps() - 500, (24, 6), "deepseek", r"tokens_per_expert\[0, 0, \d+\] is -"),
    ],
)
def test_rebalance_experts_refuses_bad_arguments_in_one_line(
    tokens: torch.Tensor, sizes: tuple[int, int], algorithm: object, message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        rebalance_experts(tokens, *sizes, None, 1, algorithm)
