"""Streams that are in no pool of torch's: as many as are asked for, and no two are one.

Torch hands out 32 streams of a device in turn. Who draws the 33rd gets the first, and waits behind
whatever hangs there; so what may hang has a stream that the driver made for it alone.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from equipoise.backends.cuda import cuda_runtime
from equipoise.backends.devices.runtime import Device


@dataclass(frozen=True)
class DriverStream:
    """A stream.

    Attributes:
        stream: as torch knows it.
        handle: as the driver does.
    """

    stream: Any
    handle: int


class DriverStreamPool:
    """Those of one device: made when none is spare, and kept. For any number of threads.

    Args:
        make: a new one, which nobody else ever gets.
    """

    def __init__(self, make: Callable[[], DriverStream]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._spare: list[DriverStream] = []

    def take(self) -> DriverStream:
        """One that is idle. Raises RuntimeError as the driver does."""
        with self._lock:
            for place, spare in enumerate(self._spare):
                with cuda_runtime.RUNTIME.allowed_in_capture():
                    idle = spare.stream.query()
                if idle:
                    return self._spare.pop(place)
            return self._make()

    def give(self, stream: DriverStream) -> None:
        """Nothing is launched there any more; what is under way may be."""
        with self._lock:
            self._spare.append(stream)


def bind_device(device: Device) -> None:
    """Make the device the calling thread's, for the driver's own functions too: these want its
    context, which torch gives a thread only when it asks the device for something."""
    device.set_current()
    cuda_runtime.bind_context(device.index)


def new_stream(device: Device) -> DriverStream:
    """From the driver: ahead of others where the device has to choose, and behind none by itself.

    What communicates for others to wait for goes first; and without the flag it would wait for the
    default stream, and that one for it.
    """
    bind_device(device)
    driver = cuda_runtime.driver()
    _, first = cuda_runtime.check(
        driver.cuCtxGetStreamPriorityRange(), "cuCtxGetStreamPriorityRange"
    )
    flag = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    (made,) = cuda_runtime.check(
        driver.cuStreamCreateWithPriority(flag, first), "cuStreamCreateWithPriority"
    )
    stream = cuda_runtime.cuda().ExternalStream(int(made), device=device.index)
    return DriverStream(stream, int(made))


_kept: dict[int, DriverStreamPool] = {}
_bells: dict[int, DriverStream] = {}
_making = threading.Lock()


def driver_streams(device: Device) -> DriverStreamPool:
    """Those of this process."""
    with _making:
        return _kept.setdefault(device.index, DriverStreamPool(lambda: new_stream(device)))


def release_stream(device: Device) -> DriverStream:
    """The one of this process on which nothing ever waits."""
    streams = driver_streams(device)
    with _making:
        if device.index not in _bells:
            _bells[device.index] = streams.take()
        return _bells[device.index]
