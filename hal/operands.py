"""Checks of what a communicator is given; for backends to share.

Every check comes before any side effect, and raises `Unsupported` (clauses X5, S2).
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from equipoise.hal.capabilities import CommunicatorCapabilities
from equipoise.hal.communicator import Rendezvous
from equipoise.hal.errors import Unsupported


def check_movable(
    capabilities: CommunicatorCapabilities, *tensors: Tensor, device: str = "cpu"
) -> None:
    """Contiguous tensors of one dtype that travels, on a device of that type."""
    for tensor in tensors:
        if tensor.dtype not in capabilities.dtypes:
            raise Unsupported(f"{tensor.dtype} does not travel here")
        if tensor.dtype != tensors[0].dtype:
            raise Unsupported(f"one dtype is needed, got {tensors[0].dtype} and {tensor.dtype}")
        if not tensor.is_contiguous() or tensor.device.type != device:
            raise Unsupported(
                f"a contiguous tensor on {device} is needed, got strides {tensor.stride()} "
                f"of shape {tuple(tensor.shape)} on {tensor.device}"
            )


def check_summable(
    capabilities: CommunicatorCapabilities, *tensors: Tensor, device: str = "cpu"
) -> None:
    """Movable tensors of a dtype that is also summed."""
    for tensor in tensors:
        if tensor.dtype not in capabilities.reductions:
            raise Unsupported(f"{tensor.dtype} is not summed here")
    check_movable(capabilities, *tensors, device=device)


def check_shape(what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Exactly this shape."""
    if tuple(tensor.shape) != shape:
        raise Unsupported(f"{what} needs shape {shape}, got {tuple(tensor.shape)}")


def check_apart(what: str, out: Tensor, tensor: Tensor) -> None:
    """Two operands without a byte in common: where one is written while the other is read (A3)."""
    first, second = sorted((out, tensor), key=Tensor.data_ptr)
    if first.data_ptr() + first.nbytes > second.data_ptr() and min(first.nbytes, second.nbytes):
        raise Unsupported(f"{what} cannot have its output overlap its input")


def check_rank(what: str, rank: int, ranks: Iterable[int]) -> None:
    """One of these ranks."""
    if rank not in ranks:
        raise Unsupported(f"{what}: rank {rank} is not one of {tuple(ranks)}")


def check_links(links: Iterable[tuple[int, int]], size: int) -> None:
    """Pairs of ranks below `size`."""
    for first, second in links:
        check_rank(f"link {first}-{second}", first, range(size))
        check_rank(f"link {first}-{second}", second, range(size))


def check_members(what: str, where: Rendezvous, members: Sequence[int]) -> None:
    """Different ranks of the run, this one among them."""
    if len(set(members)) != len(members):
        raise Unsupported(f"{what}: a rank comes twice in {tuple(members)}")
    for rank in members:
        check_rank(what, rank, range(where.size))
    check_rank(what, where.rank, members)


def check_rows(what: str, rows: Sequence[int], size: int) -> None:
    """A number of rows for every rank."""
    if len(rows) != size or min(rows) < 0:
        raise Unsupported(f"{what} needs {size} row counts, got {tuple(rows)}")


def check_blob(blob: Tensor) -> None:
    """Contiguous bytes."""
    if blob.dtype != torch.uint8 or blob.ndim != 1 or not blob.is_contiguous():
        raise Unsupported(f"a blob is contiguous uint8 [n], got {blob.dtype} {list(blob.shape)}")
