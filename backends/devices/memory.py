"""Host and device memory: what may be copied without waiting, and who keeps it meanwhile.

New routing tables as one block of page-locked memory, so that they travel in one copy.
"""

import torch
from torch import Tensor

from equipoise.backends.devices.stream import own_stream
from equipoise.hal.errors import SlotError
from equipoise.hal.kernels import TableUpdate
from equipoise.hal.stream import Stream

HOST_TYPE = "cpu"
"""The type of torch's devices that no vendor's device can write by itself."""


def pinned(nbytes: int) -> Tensor:
    """Page-locked host memory, uint8 [nbytes], from the vendor's caching allocator; any thread may
    write to it, in inference mode or not."""
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def to_pinned(source: Tensor) -> Tensor:
    """Memory that a copy may read when its stream comes to it.

    The vendor turns a copy from pageable memory into one that waits for the stream, so that such a
    source is taken now, into page-locked memory; anything else is `source` itself. The host
    allocator records the streams of copies from its own blocks, and keeps a block that is dropped
    until they have passed.
    """
    return (
        torch.empty_like(source, pin_memory=True).copy_(source) if is_pageable(source) else source
    )


def is_pageable(source: Tensor) -> bool:
    """Whether it lies in host memory that the system may move."""
    return source.device.type == HOST_TYPE and not source.is_pinned()


def check_reachable(out: Tensor, what: str) -> None:
    """Raise `SlotError` for memory that no stream can write by itself."""
    if is_pageable(out):
        raise SlotError(f"{what} must lie on the device or in page-locked memory: use pinned()")


def copy(to: Tensor, source: Tensor) -> None:
    """Copy on the current stream; the host never waits, since `staged` and `check_reachable` saw
    both."""
    to.copy_(source, non_blocking=True)


def record_stream_use(stream: Stream, *tensors: Tensor) -> None:
    """Tell the device's allocator that the stream uses these, wherever they were made (K1).

    In a capture the graph keeps them instead: it runs on other streams than the one it was captured
    on, and an allocator that is told of that one asks it in the middle of a later capture
    (PyTorch #193982).
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
    """Layer numbers and tables side by side, int32 [layers, 1 + ...]; taken now."""
    layers = torch.tensor(update.layers, dtype=torch.int32)[:, None]
    parts = [layers, update.start, update.replicas, update.cumulative]
    width = sum(part.shape[1] for part in parts)
    block = pinned(len(update.layers) * width * torch.int32.itemsize).view(torch.int32)
    return torch.cat(parts, dim=1, out=block.view(-1, width))
