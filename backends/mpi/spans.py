"""Tensors as MPI sees them: an address, a count and a type."""

from types import ModuleType
from typing import TypeAlias

import torch
from torch import Tensor

NUMBERS = {
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
}
"""What MPI sums by itself, and its name for it."""
Span: TypeAlias = tuple[object, int, object]
"""What mpi4py takes for a message: the memory, the elements of one rank's part, MPI's type.

mpi4py does not hold an explicit count against the length of the memory.
"""


def raw(mpi: ModuleType, tensor: Tensor, parts: int = 1) -> Span:
    """The bytes of a contiguous CPU tensor of any dtype, in so many equal parts."""
    return _buffer(mpi, tensor), tensor.nbytes // parts, mpi.BYTE


def numbers(mpi: ModuleType, tensor: Tensor, parts: int = 1) -> Span:
    """The elements of a contiguous CPU tensor whose dtype is summed, in so many equal parts."""
    return _buffer(mpi, tensor), tensor.numel() // parts, getattr(mpi, NUMBERS[tensor.dtype])


def apart(tensor: Tensor, *written: Tensor) -> Tensor:
    """`tensor`, or a copy of it where it overlaps what will be written.

    So an in-place call equals the out-of-place one; MPI itself forbids such aliases (clause A3).
    """
    return tensor.clone() if any(_overlap(tensor, other) for other in written) else tensor


def _overlap(one: Tensor, other: Tensor) -> bool:
    first, second = sorted((one, other), key=lambda tensor: tensor.data_ptr())
    return first.data_ptr() + first.nbytes > second.data_ptr()


def _buffer(mpi: ModuleType, tensor: Tensor) -> object:
    return mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
