"""What libraries are given: bytes, on the communicator's device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.backends.devices.runtime import Device
from equipoise.hal.errors import Unsupported

MOVED = frozenset(
    {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    | {torch.float8_e4m3fn, torch.float8_e5m2}
)
"""Everything that has bytes: what moves travels as int8."""
INTEGERS = frozenset({torch.int32, torch.int64})
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""What is summed: the one always exactly, the other where the library adds in one order (D1)."""


def as_bytes(tensor: Tensor) -> Tensor:
    """int8 [nbytes]: an element type that every library knows."""
    return tensor.detach().view(-1).view(torch.int8)


def check_place(device: Device, tensors: Sequence[Tensor]) -> None:
    """All on the communicator's own device. Raises `Unsupported`."""
    for tensor in tensors:
        if tensor.device.index != device.index:
            raise Unsupported(f"a tensor on {device.torch} is needed, got {tensor.device}")
