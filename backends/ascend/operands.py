"""What HCCL is given: bytes, in layouts that it knows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.backends.ascend.group import plain
from equipoise.hal.errors import Unsupported

DEVICE = "npu"
"""The type of the device that tensors must be on."""


def as_bytes(tensor: Tensor) -> Tensor:
    """int8 [nbytes]: the element type that HCCL documents for everything that moves."""
    return tensor.detach().view(-1).view(torch.int8)


def check_plain(*tensors: Tensor) -> None:
    """Nothing in a private format: its bytes are not what its shape says. Raises `Unsupported`."""
    if not plain(tensors):
        raise Unsupported("a tensor in a private format does not travel; send its storage")


def check_place(index: int, tensors: Sequence[Tensor]) -> None:
    """All on the communicator's own device. Raises `Unsupported`."""
    for tensor in tensors:
        if tensor.device.index != index:
            raise Unsupported(f"a tensor on {DEVICE}:{index} is needed, got {tensor.device}")
