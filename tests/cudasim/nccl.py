"""NCCL's backend over the simulated driver: its own code above, HCCL's simulation below.

    PYTHONPATH=tests python -m npusim --schedule lazy -- python -m equipoise conformance \\
        --backend cudasim:BACKEND --communicator cudasim.nccl:NCCL --ranks 4
"""

import threading
from functools import cache
from typing import Any

import cudasim
from cudasim.nccl_library import SimulatedNccl
from equipoise.backends.ascend import native as npu_native
from equipoise.backends.cuda import own_streams
from equipoise.backends.cuda.nccl import NcclBackend
from equipoise.backends.cuda.nccl_api import Api
from equipoise.backends.cuda.own_streams import OwnStream
from equipoise.backends.devices.vendor import Device

POOL = 32
"""Streams of each of torch_npu's pools: the next one is the first again."""
_drawn: dict[int, int] = {}
_streams: dict[int, Any] = {}
_drawing = threading.Lock()


@cache
def load() -> Api:
    """The stand-in for libnccl."""
    return Api(SimulatedNccl(flushed))


def new_stream(device: Device) -> OwnStream:
    """From the pool that nobody else draws from, and never the same again."""
    device.settle()
    with _drawing:
        _drawn[device.index] = _drawn.get(device.index, 0) + 1
        if _drawn[device.index] > POOL:
            raise RuntimeError("the stand-in has no stream left")
        stream = npu_native.npu().Stream(device=device.index, priority=-1)
        _streams[stream.npu_stream] = stream
    return OwnStream(stream, stream.npu_stream)


def flushed(handle: int) -> int:
    """Launches what torch_npu holds back for its streams: asking it for a handle does that."""
    return int(_streams[handle].npu_stream)


own_streams.new_stream = new_stream
NCCL = NcclBackend(load)

__all__ = ["NCCL", "cudasim"]
