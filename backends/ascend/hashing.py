"""The hashes of the contract in int64 arithmetic on the device, without a scalar from the host.

The same functions as in `equipoise.hal.routing` and `equipoise.hal.checksum`, bit for bit. There is
one reason to write them again: torch_npu makes of `tensor >> 16` a copy of the 16 out of host
memory that it gives back at once. In a captured graph that copy stays, and reads at each replay
whatever is there by then. So what is shifted by is filled in on the device.
"""

import operator
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from equipoise.hal.checksum import CHUNK, STEP64, as_int64
from equipoise.hal.routing import MASK32, STEP32

Word = TypeVar("Word", int, Tensor)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """`x >> bits`, int64, which repeats the sign."""
    by = torch.full((), bits, dtype=torch.int64, device=x.device)
    return torch.bitwise_right_shift(x, by)


def mix32(index: Tensor, rank: int, layer: int, step: int) -> Tensor:
    """`equipoise.hal.routing.mix32` of int64 indices in [0, 2**32)."""
    state = 0
    for word in (step, layer, rank):
        state = _finalise32(((state ^ (word & MASK32)) + STEP32) & MASK32, operator.rshift)
    return _finalise32(((index ^ state) + STEP32) & MASK32, shift_right)


def _finalise32(x: Word, right: Callable[[Word, int], Word]) -> Word:
    x = x ^ right(x, 16)
    x = (x * 0x99F0736B) & MASK32
    x = x ^ right(x, 15)
    x = (x * 0xCEDA5629) & MASK32
    return x ^ right(x, 16)


def device_checksum(data: Tensor) -> Tensor:
    """`equipoise.hal.checksum.checksum` of the bytes of a contiguous tensor, int64 []."""
    flat = data.detach().reshape(-1).view(torch.uint8)
    length = int(_mix64(torch.tensor(~flat.numel())))  # by the host
    total = torch.full((), length, dtype=torch.int64, device=flat.device)
    for first, part in enumerate(torch.split(flat, 4 * CHUNK)):
        words = _words(part)
        index = torch.arange(words.numel(), device=flat.device) + (first * CHUNK + 1)
        total += _mix64(words + index * as_int64(STEP64)).sum()
    return total


def _words(data: Tensor) -> Tensor:
    """Little-endian 32-bit words as int64; one byte at a time, so that any offset will do."""
    word_bytes = torch.nn.functional.pad(data, (0, -data.numel() % 4)).reshape(-1, 4).long()
    first, second, third, fourth = word_bytes.unbind(1)
    return first + second * (1 << 8) + third * (1 << 16) + fourth * (1 << 24)


def _mix64(x: Tensor) -> Tensor:
    x = x ^ _shift64(x, 32)
    x = x * as_int64(0xC92A4895548C7445)
    x = x ^ _shift64(x, 29)
    x = x * as_int64(0xB33D02297CFAF58D)
    return x ^ _shift64(x, 32)


def _shift64(x: Tensor, bits: int) -> Tensor:
    """Right shift that brings in zeros."""
    return shift_right(x, bits) & ((1 << (64 - bits)) - 1)
