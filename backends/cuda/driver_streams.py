"""CUDA streams made by the driver for one use each, outside torch's pool.

Torch hands out 32 streams of a device in turn; the 33rd is the first again, and its work queues
after whatever hangs there. So what may hang gets a stream that the driver made for it alone.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from equipoise.backends.cuda import cuda_runtime
from equipoise.backends.devices.runtime import Device


@dataclass(frozen=True)
class DriverStream:
    """A stream that the driver made.

    Attributes:
        stream: as torch knows it.
        handle: as the driver does.
    """

    stream: Any
    handle: int


class DriverStreamPool:
    """The driver's streams of one device: reused when idle, made when none is. Thread-safe.

    They are never destroyed: something may still hang on one.

    Args:
        make: makes a new one.
    """

    def __init__(self, make: Callable[[], DriverStream]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._spare: list[DriverStream] = []

    def take(self) -> DriverStream:
        """An idle stream. Raises RuntimeError as the driver does."""
        with self._lock:
            for place, spare in enumerate(self._spare):
                with cuda_runtime.RUNTIME.allowed_in_capture():
                    idle = spare.stream.query()
                if idle:
                    return self._spare.pop(place)
            return self._make()

    def give(self, stream: DriverStream) -> None:
        """Give a stream back. Nothing is launched there any more; what is in flight may still run,
        which is why `take` looks for an idle one."""
        with self._lock:
            self._spare.append(stream)


def bind_device(device: Device) -> None:
    """Make the device the calling thread's, also for functions of the driver: they need its
    context, which torch binds only when the thread uses the device."""
    device.set_current()
    cuda_runtime.bind_context(device.index)


def new_stream(device: Device) -> DriverStream:
    """A new stream of the highest priority that does not synchronise with the default stream.

    Highest priority, because other streams wait for what communicates. Without the flag
    CU_STREAM_NON_BLOCKING it would wait for the default stream, and the default stream for it.
    """
    bind_device(device)
    driver = cuda_runtime.driver()
    _, first = cuda_runtime.check(
        driver.cuCtxGetStreamPriorityRange(), "cuCtxGetStreamPriorityRange"
    )
    flag = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    (handle,) = cuda_runtime.check(
        driver.cuStreamCreateWithPriority(flag, first), "cuStreamCreateWithPriority"
    )
    stream = cuda_runtime.cuda().ExternalStream(int(handle), device=device.index)
    return DriverStream(stream, int(handle))


_pools: dict[int, DriverStreamPool] = {}
_release_streams: dict[int, DriverStream] = {}
_making = threading.Lock()


def driver_streams(device: Device) -> DriverStreamPool:
    """The pool of this process for a device."""
    with _making:
        return _pools.setdefault(device.index, DriverStreamPool(lambda: new_stream(device)))


def release_stream(device: Device) -> DriverStream:
    """The stream of this process on which nothing ever waits, to release others from."""
    # Not under `_making`, which this takes itself.
    streams = driver_streams(device)
    with _making:
        if device.index not in _release_streams:
            _release_streams[device.index] = streams.take()
        return _release_streams[device.index]
