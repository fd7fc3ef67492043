"""Copies and checksums of bytes on an NPU, and the vendor's private matrix format FRACTAL_NZ.

The format is kept with the storage: every view of it, also by `set_` into a tensor of bytes, is in
the private format, and a copy of such a view converts. So the bytes are reached by a second storage
over the same address, which is plain.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from equipoise.backends.ascend import private_api
from equipoise.backends.ascend.hashing import device_checksum
from equipoise.backends.ascend.private_api import MODULE
from equipoise.backends.devices.memory import copy
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.errors import SlotError, Unsupported
from equipoise.hal.slots import Segment
from equipoise.hal.stream import Stream

FRACTAL_NZ = 29
"""The vendor's number of the format."""
PLAIN_FORMATS = frozenset({-1, 0, 2, 30})
"""Numbers of formats in which elements simply follow each other: undefined, NCHW, ND, NCDHW."""


def empty_private(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a matrix, or for a stack of them, in FRACTAL_NZ.

    Raises `Unsupported` for less than two dimensions and for a dtype that the format does not take.
    """
    if len(shape) < 2:
        raise Unsupported(f"FRACTAL_NZ holds matrices, not {list(shape)}")
    try:
        tensor: Tensor = _module().empty_with_format(
            list(shape), dtype=dtype, device=device, acl_format=FRACTAL_NZ
        )
    except RuntimeError as error:
        raise Unsupported(f"no FRACTAL_NZ of {dtype}: {str(error).splitlines()[0]}") from error
    if not is_private(tensor):
        raise Unsupported(f"no FRACTAL_NZ of {dtype}: torch_npu made a plain tensor")
    return tensor


def is_private(tensor: Tensor) -> bool:
    """Whether its storage is in a private format."""
    return int(_module().get_npu_format(tensor)) not in PLAIN_FORMATS


def format_of(tensor: Tensor) -> SlotFormat:
    """How the bytes of a tensor are laid out, in the contract's word."""
    return SlotFormat.PRIVATE if is_private(tensor) else SlotFormat.STRIDED


def storage_bytes(tensor: Tensor) -> Tensor:
    """Everything that the tensor stores, padding included: plain uint8 [n] over the same memory.

    Does not own the memory, and the allocator does not know it: keep the tensor, and tell the
    allocator of the tensor's streams.
    """
    nbytes = tensor.untyped_storage().nbytes()
    plain = private_api.storage_at(tensor.untyped_storage().data_ptr(), tensor.device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(plain)


def segment_bytes(segment: Segment) -> Tensor:
    """What a copy of the segment takes, uint8 [type.nbytes].

    Raises `SlotError` for a private tensor that is declared strided: its bytes are not its elements
    in their order, and a plain copy would convert without saying so.
    """
    if segment.format is SlotFormat.PRIVATE:
        return storage_bytes(segment.data)
    if segment.data.device.type == "npu" and is_private(segment.data):
        raise SlotError(f"segment {segment.name!r} is in a private format and declared strided")
    return segment.bytes


def _module() -> Any:
    return import_module(MODULE)


class NpuByteOps:
    """A private format is copied as the bytes that it stores, like anything else (A10)."""

    def view(self, segment: Segment) -> Tensor:
        """The segment's bytes."""
        return segment_bytes(segment)

    def words(self, part: Tensor) -> Tensor:
        """As it is."""
        return part

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """One copy after the other."""
        for to, source in pairs:
            copy(to, source)

    def checksum_parts(self, parts: Sequence[Tensor], out: Tensor, stream: Stream) -> None:
        """Of all parts, put together first."""
        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        copy(out, device_checksum(whole))
