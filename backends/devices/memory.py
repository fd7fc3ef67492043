"""Memory that a stream can copy without blocking the host, and how long it is kept."""

import torch
from torch import Tensor

from equipoise.backends.devices.stream import own_stream
from equipoise.hal.errors import SlotError
from equipoise.hal.kernels import TableUpdate
from equipoise.hal.stream import Stream

HOST_TYPE = "cpu"
"""Torch's device type of host memory."""


def pinned(nbytes: int) -> Tensor:
    """Page-locked host memory, uint8 [nbytes], from the vendor's caching allocator; any thread may
    write to it, in inference mode or not."""
    # A tensor made in inference mode cannot be written outside of it.
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def to_pinned(source: Tensor) -> Tensor:
    """`source` itself, or a page-locked copy if it lies in pageable memory.

    A vendor turns a copy from pageable memory into one that blocks the host until the stream gets
    there, so such a source is copied now. The host allocator records the streams that copy from its
    blocks, and keeps a dropped block until they have passed.
    """
    return (
        torch.empty_like(source, pin_memory=True).copy_(source) if is_pageable(source) else source
    )


def is_pageable(source: Tensor) -> bool:
    """Whether the tensor lies in host memory that is not page-locked."""
    return source.device.type == HOST_TYPE and not source.is_pinned()


def check_reachable(out: Tensor, what: str) -> None:
    """Raise `SlotError` for pageable memory, which a stream cannot write without the host."""
    if is_pageable(out):
        raise SlotError(f"{what} must lie on the device or in page-locked memory: use pinned()")


def copy(to: Tensor, source: Tensor) -> None:
    """Copy on the current stream. The host never waits: callers pass both tensors through
    `to_pinned` or `check_reachable` first."""
    to.copy_(source, non_blocking=True)


def record_stream_use(stream: Stream, *tensors: Tensor) -> None:
    """Tell the device's allocator that the stream uses these tensors, so that it does not reuse
    their memory before the stream has passed (K1).

    In a capture the graph keeps them instead. It runs on other streams than the one it was captured
    on, and an allocator that knows of the capture stream queries it in the middle of a later
    capture (PyTorch #193982).
    """
    own = own_stream(stream)
    if own.capturing:
        own.keep_alive(tensors)
        return
    native = own.native_stream
    for tensor in tensors:
        if tensor.device.type != HOST_TYPE:
            tensor.record_stream(native)


def pack_table_update(update: TableUpdate) -> Tensor:
    """Layer numbers and new tables side by side, int32 [layers, 1 + ...], in one block of
    page-locked memory, so that they travel in one copy. The update is read before this returns."""
    layers = torch.tensor(update.layers, dtype=torch.int32)[:, None]
    parts = [layers, update.start, update.replicas, update.cumulative]
    width = sum(part.shape[1] for part in parts)
    block = pinned(len(update.layers) * width * torch.int32.itemsize).view(torch.int32)
    return torch.cat(parts, dim=1, out=block.view(-1, width))
