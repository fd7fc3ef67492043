"""SGLang's dispatcher: types and widths by algorithm."""

from enum import Enum, auto

import pytest
import torch

from equipoise.compat.sglang import rebalance_experts
from equipoise.hal.errors import PlacementError


class EplbAlgorithm(Enum):
    """The engine's, as far as it is read."""

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
    for named in (algorithm, algorithm.name):
        placement, slots, counts = rebalance_experts(steps(), 24, 6, 4, 2, named)
        assert (placement.dtype, slots.dtype, counts.dtype) == (first, other, other)
        assert placement.shape == (3, 24)
        assert slots.shape == (3, 16, width or int(counts.max()))
        assert counts.sum(dim=1).tolist() == [24] * 3
        for layer, expert in torch.cartesian_prod(torch.arange(3), torch.arange(16)).tolist():
            held = slots[layer, expert][slots[layer, expert] >= 0]
            assert len(held) == counts[layer, expert] > 0
            assert (placement[layer, held.long()] == expert).all()


def test_rebalance_experts_sums_steps() -> None:
    given = steps()
    whole = given.sum(dim=0, keepdim=True)
    wanted = rebalance_experts(whole, 24, 6, None, 1, "deepseek")
    for ours, theirs in zip(
        rebalance_experts(given.float(), 24, 6, None, 1, "deepseek"), wanted, strict=True
    ):
        assert torch.equal(ours, theirs)


def test_rebalance_experts_keeps_installed_map_when_ranks_are_level() -> None:
    now = rebalance_experts(steps() + 500, 24, 6, None, 1, "deepseek")[0]
    again = rebalance_experts(steps() + 500, 24, 6, None, 1, "deepseek", installed=now)[0]
    assert torch.equal(again, now)


@pytest.mark.parametrize(
    ("tokens", "sizes", "algorithm", "said"),
    [
        (steps(), (24, 6), EplbAlgorithm.elasticity_aware, "got 'elasticity_aware'"),
        (steps()[0], (24, 6), "deepseek", r"must be \(steps, layers, experts\)"),
        (steps(), (24, 5), "deepseek", "24 slots do not divide into ranks of 5"),
        (steps() - 500, (24, 6), "deepseek", r"tokens_per_expert\[0, 0, \d+\] is -"),
    ],
)
def test_rebalance_experts_refuses_bad_arguments_in_one_line(
    tokens: torch.Tensor, sizes: tuple[int, int], algorithm: object, said: str
) -> None:
    with pytest.raises(PlacementError, match=said):
        rebalance_experts(tokens, *sizes, None, 1, algorithm)
