"""Words of page-locked memory that the host and a device's streams both read and write.

**NVIDIA's warning** (CUDA driver API, stream memory operations): "Improper use of these APIs may
deadlock the application. Synchronization ordering established through these APIs is not visible to
CUDA. CUDA tasks that are (even indirectly) ordered by these APIs should also have that order
expressed with CUDA-visible dependencies such as events. This ensures that the scheduler does not
serialize them in an improper order."

What can be expressed by events is: an operation that was launched is waited for by its event, and
what a mover copied has ended by its event before the host gives a word. What is left is a wait that
comes before its writer: an event that was never recorded holds nobody, so no event can say it. For
those the driver does not know that the one stream needs the other, and may put both into one queue
of the device, the writer behind the wait. Hence as many queues as there can be, and no independent
copies where streams share them (`cuda_runtime.shared_queues`). What that leaves, a GPU has to show
(`tests/devices/cuda/test_more_streams_than_queues.py`).

The two words of a stream lock on a GPU: page-locked host memory that streams wait for and write.

The device's front end does both (stream memory operations), so that a waiting stream occupies no
multiprocessor (clause L4), and a graph keeps them as nodes. The host gives a word by storing into
it: no call of the driver's stands between a mover and the stream that waits for it. TensorRT-LLM's
copies deadlocked on exactly such a call, behind a launch that held the driver's lock (tech blog 8).
"""

import threading
from typing import Any

import torch

from equipoise import _native
from equipoise.backends.cuda import cuda_runtime
from equipoise.backends.cuda.driver_streams import bind_device
from equipoise.backends.devices.memory import pinned
from equipoise.backends.devices.runtime import Device

CACHE_LINE = 64
"""Bytes between two words: each has a line of the processors' caches to itself."""
FLAGS_PER_PAGE = 1024
"""Words that are allocated at once."""


class HostFlag:
    """An aligned int32, which no tearing can reach.

    Args:
        cell: the host's view, int32 [1].
        address: where the device finds it.
    """

    def __init__(self, cell: Any, address: int) -> None:
        self._cell = cell
        self._address = address

    @property
    def value(self) -> int:
        """As the host sees it."""
        return int(self._cell[0])

    def store(self, value: int) -> None:
        """From the host, after all that its thread stored before, as the device sees it."""
        _native.store_release_system(self._cell, value)

    def enqueue_wait(self, stream: Any, value: int) -> None:
        """The stream goes on once the word has that value."""
        driver = cuda_runtime.driver()
        equal = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
        answer = driver.cuStreamWaitValue32(_handle(stream), self._address, value, equal)
        cuda_runtime.check(answer, "cuStreamWaitValue32")

    def enqueue_write(self, stream: Any, value: int) -> None:
        """The stream writes it, behind all that it wrote before."""
        driver = cuda_runtime.driver()
        ordered = driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
        answer = driver.cuStreamWriteValue32(_handle(stream), self._address, value, ordered)
        cuda_runtime.check(answer, "cuStreamWriteValue32")


class HostFlagPool:
    """Hands out words of one device, never one twice.

    Their memory lives as long as the process: what a stream was told to write, it writes even when
    its lock is long forgotten, and then it must not hit anybody else's memory. A line each, for a
    lock and for every acquire that was captured, is little.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._spare: list[HostFlag] = []
        self._pages: list[torch.Tensor] = []

    def take(self) -> HostFlag:
        """A word of 0."""
        with self._lock:
            if not self._spare:
                self._spare = self._page()
            return self._spare.pop()

    def _page(self) -> list[HostFlag]:
        bind_device(self._device)
        with self._device.runtime.allowed_in_capture():
            memory = pinned(CACHE_LINE * FLAGS_PER_PAGE).view(torch.int32).zero_()
        self._pages.append(memory)
        driver = cuda_runtime.driver()
        (address,) = cuda_runtime.check(
            driver.cuMemHostGetDevicePointer(memory.data_ptr(), 0), "cuMemHostGetDevicePointer"
        )
        lines = memory.view(FLAGS_PER_PAGE, -1).numpy()
        return [
            HostFlag(line[:1], int(address) + place * CACHE_LINE)
            for place, line in enumerate(lines)
        ]


_shelves: dict[int, HostFlagPool] = {}
_making = threading.Lock()


def host_flag_pool(device: Device) -> HostFlagPool:
    """The one of this process for a device."""
    with _making:
        return _shelves.setdefault(device.index, HostFlagPool(device))


def _handle(stream: Any) -> Any:
    return cuda_runtime.driver().CUstream(int(stream.cuda_stream))


CLEAR, SET = 0, 1


class CudaAcquireFlag:
    """Given by a store of the host; taken by the stream that waited."""

    def __init__(self, device: Device) -> None:
        self._flag = host_flag_pool(device).take()

    def wait(self, stream: Any) -> None:
        """Enqueue the wait, and the taking."""
        self._flag.enqueue_wait(stream, SET)
        self._flag.enqueue_write(stream, CLEAR)

    def signal(self) -> None:
        """Store the 1, after what the mover wrote: a device's copies have ended, other threads'
        stores were handed over, and those of this thread come before a barrier in the store."""
        self._flag.store(SET)

    @property
    def reusable(self) -> bool:
        """Always: nothing is kept of it but its value."""
        return True


class CudaReleaseFlag:
    """Set by a stream's write; read by the host."""

    def __init__(self, device: Device) -> None:
        self._flag = host_flag_pool(device).take()

    def set(self, stream: Any) -> None:
        """Enqueue the write."""
        self._flag.enqueue_write(stream, SET)

    def is_set(self) -> bool:
        """Whether the stream came there."""
        return self._flag.value == SET

    def clear(self) -> None:
        """Back to 0."""
        self._flag.store(CLEAR)


class CudaLockFlags:
    """Makes them."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def acquire_flag(self) -> CudaAcquireFlag:
        """A word of 0."""
        return CudaAcquireFlag(self._device)

    def release_flag(self) -> CudaReleaseFlag:
        """A word of 0."""
        return CudaReleaseFlag(self._device)
