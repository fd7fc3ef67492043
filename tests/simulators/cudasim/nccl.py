"""NCCL's backend over the simulated driver: its own code above, HCCL's simulation below.

    PYTHONPATH=tests python -m npusim --schedule lazy -- python -m equipoise conformance \\
        --backend cudasim:BACKEND --communicator cudasim.nccl:NCCL --ranks 4
"""

import threading
from functools import cache
from typing import Any

from cudasim import stand_in
from cudasim.nccl_library import SimulatedNccl
from equipoise.backends.ascend import npu_runtime as npu_native
from equipoise.backends.ascend.hccl_streams import hccl_stream_pool
from equipoise.backends.cuda import driver_streams
from equipoise.backends.cuda import nccl as backend
from equipoise.backends.cuda.driver_streams import DriverStream
from equipoise.backends.cuda.nccl import NcclBackend
from equipoise.backends.cuda.nccl_api import NcclApi
from equipoise.backends.devices.runtime import Device

SIZES: tuple[int, ...] = (4, 1 << 12)
"""Of sums that connect algorithms: the stand-in has one for all sizes, and adds on the host."""
_streams: dict[int, Any] = {}
_drawing = threading.Lock()


@cache
def load() -> NcclApi:
    """The stand-in for libnccl."""
    return NcclApi(SimulatedNccl(flushed))


def new_stream(device: Device) -> DriverStream:
    """Out of HCCL's pool, by the account of who has which; never given back."""
    device.set_current()
    npu = npu_native.npu()
    with _drawing:
        account = hccl_stream_pool(npu, device.index)
        account.reserve_next()
        stream = npu.Stream(device=device.index, priority=-1)
        account.assign(stream.stream_id, f"stream {stream.npu_stream:#x} of NCCL's stand-in")
        _streams[stream.npu_stream] = stream
    return DriverStream(stream, stream.npu_stream)


def flushed(handle: int) -> int:
    """Launches what torch_npu holds back for its streams: asking it for a handle does that."""
    return int(_streams[handle].npu_stream)


def __getattr__(name: str) -> NcclBackend:
    """`NCCL`: whoever asks for it has the stand-ins put in place, for the whole process."""
    if name != "NCCL":
        raise AttributeError(name)
    stand_in.install()
    driver_streams.new_stream = new_stream
    backend.WARMUP_SIZES = SIZES
    return NcclBackend(load)
