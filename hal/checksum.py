"""A checksum of a tensor's bytes that sees values, positions and length.

checksum = (mix64(~length) + sum over i of mix64(w_i + (i + 1) * 0x9E3779B97F4A7C15)) mod 2**64,
where w_i are the bytes as little-endian 32-bit words (zeros pad the last) and mix64(x) is
`x ^= x >> 32; x *= 0xC92A4895548C7445; x ^= x >> 29; x *= 0xB33D02297CFAF58D; x ^= x >> 32`, all
modulo 2**64. A sum, so that any number of workers in any order agrees. It finds accidents (a torn,
dropped, swapped or misplaced copy); it does not resist an adversary.
"""

import torch
from torch import Tensor

MASK64 = (1 << 64) - 1
STEP64 = 0x9E3779B97F4A7C15
CHUNK = 1 << 20
"""Words per pass: bounds the temporaries to a few times 8 MiB."""


def checksum(tensor: Tensor) -> int:
    """Checksum in [0, 2**64) of the bytes of a C-contiguous `tensor` of any dtype and device.

    The reference, in wrapping int64 arithmetic; reads one number back from the device.

    Raises:
        ValueError: the tensor is not C-contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"tensor: expected C-contiguous, got strides {tensor.stride()}")
    data = tensor.detach().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for first, part in enumerate(torch.split(data, 4 * CHUNK)):
        total += _sum_words(_words(part), first * CHUNK)
    length = torch.tensor(~data.numel(), dtype=torch.int64)
    return (int(total) + int(_mix64(length))) & MASK64


def _words(data: Tensor) -> Tensor:
    """Little-endian 32-bit words as int64; one byte at a time, so that any offset will do."""
    padded = torch.nn.functional.pad(data, (0, -data.numel() % 4)).reshape(-1, 4).long()
    return padded[:, 0] | padded[:, 1] << 8 | padded[:, 2] << 16 | padded[:, 3] << 24


def _sum_words(words: Tensor, first: int) -> Tensor:
    index = torch.arange(first + 1, first + 1 + words.numel(), device=words.device)
    return _mix64(words + index * as_int64(STEP64)).sum()


def _mix64(x: Tensor) -> Tensor:
    x = x ^ _shift(x, 32)
    x = x * as_int64(0xC92A4895548C7445)
    x = x ^ _shift(x, 29)
    x = x * as_int64(0xB33D02297CFAF58D)
    return x ^ _shift(x, 32)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Right shift that brings in zeros: int64 would repeat the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def as_int64(x: int) -> int:
    """The same 64 bits, below 2**64, as torch's int64 holds them."""
    return x - (1 << 64) if x >> 63 else x
