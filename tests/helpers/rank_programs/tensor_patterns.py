"""Data that every rank can make for every other rank, so that each can tell what must arrive."""

import torch
from torch import Tensor

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    )
}


def pattern(seed: int, rank: int, shape: list[int], dtype: str) -> Tensor:
    """Small whole numbers, other ones per rank: every dtype holds them, no sum of them rounds."""
    random = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randint(0, 2 if dtype == "bool" else 7, shape, generator=random)
    return values.to(DTYPES[dtype])


def empty(shape: list[int], dtype: str) -> Tensor:
    """Where something arrives; filled with what must not survive."""
    return torch.ones(shape).to(DTYPES[dtype])


def same(actual: Tensor, expected: Tensor) -> bool:
    """Equal as bytes."""
    return actual.shape == expected.shape and torch.equal(
        actual.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)
    )
