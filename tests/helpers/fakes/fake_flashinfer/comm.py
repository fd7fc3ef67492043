"""The mask of ranks that take part."""

from collections.abc import Sequence

import torch
from torch import Tensor


def moe_a2a_active_rank_mask(active_ranks: Sequence[int], ep_size: int) -> Tensor:
    assert all(0 <= rank < ep_size for rank in active_ranks)
    return torch.tensor([sum(1 << rank for rank in active_ranks)], dtype=torch.uint64)
