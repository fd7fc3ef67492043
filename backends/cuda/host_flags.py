"""Flags in page-locked host memory that the host and a device's streams both read and write.

A stream waits for a flag and writes one by stream memory operations, which the device's front end
executes: a waiting stream occupies no multiprocessor (clause L4), and a graph keeps them as nodes.
The host sets a flag by a store into memory, so no call of the driver is needed to let a stream
continue. TensorRT-LLM's copies deadlocked on exactly such a call, queued after a launch that held
the driver's lock (tech blog 8).

**NVIDIA's warning** (CUDA driver API, stream memory operations): "Improper use of these APIs may
deadlock the application. Synchronization ordering established through these APIs is not visible to
CUDA. CUDA tasks that are (even indirectly) ordered by these APIs should also have that order
expressed with CUDA-visible dependencies such as events. This ensures that the scheduler does not
serialize them in an improper order."

Events express what they can: an operation that was launched is waited for by its event, and a
writer's copies have ended, by their event, before the host sets a flag. What is left is a wait that
is issued before its writer, which no event can express, since an event that was never recorded
holds no stream. There the driver does not know that one stream needs the other, and may put both
into one hardware queue, the writer after the wait. Hence as many queues as possible, and no claim
of independent copies where streams share queues (`cuda_runtime.shared_queues`). It suffices for 32
streams that wait at once, and not for more (`tests/devices/cuda/test_waiting_streams.py`).
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
"""Bytes between two flags: each has a cache line to itself, so that polling one does not slow
writes of its neighbours."""
FLAGS_PER_PAGE = 1024
"""Flags that are allocated at once: 64 KiB of page-locked memory, whose allocation is slow and
synchronises."""


class HostFlag:
    """An aligned int32, so that every read and write of it is atomic.

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
        """Store from the host. The device sees it after all earlier stores of the calling thread (a
        release store at system scope)."""
        _native.store_release_system(self._cell, value)

    def enqueue_wait(self, stream: Any, value: int) -> None:
        """Make the stream wait until the flag has that value."""
        driver = cuda_runtime.driver()
        equal = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
        answer = driver.cuStreamWaitValue32(_handle(stream), self._address, value, equal)
        cuda_runtime.check(answer, "cuStreamWaitValue32")

    def enqueue_write(self, stream: Any, value: int) -> None:
        """Make the stream write it, after all that it wrote before."""
        # The default, with a memory barrier: CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER would let the
        # flag overtake the stream's data.
        driver = cuda_runtime.driver()
        ordered = driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
        answer = driver.cuStreamWriteValue32(_handle(stream), self._address, value, ordered)
        cuda_runtime.check(answer, "cuStreamWriteValue32")


class HostFlagPool:
    """Hands out the flags of one device, each only once.

    Their memory is never freed: a stream may write a flag long after its lock was dropped, and must
    not hit other memory then. A cache line per lock and per captured acquire is little.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._spare: list[HostFlag] = []
        self._pages: list[torch.Tensor] = []

    def take(self) -> HostFlag:
        """A flag of 0."""
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


_pools: dict[int, HostFlagPool] = {}
_making = threading.Lock()


def host_flag_pool(device: Device) -> HostFlagPool:
    """The pool of this process for a device."""
    with _making:
        return _pools.setdefault(device.index, HostFlagPool(device))


def _handle(stream: Any) -> Any:
    return cuda_runtime.driver().CUstream(int(stream.cuda_stream))


CLEAR, SET = 0, 1


class CudaAcquireFlag:
    """Set by a store of the host; cleared by the stream that waited."""

    def __init__(self, device: Device) -> None:
        self._flag = host_flag_pool(device).take()

    def wait(self, stream: Any) -> None:
        """Enqueue the wait, and the clearing after it."""
        self._flag.enqueue_wait(stream, SET)
        self._flag.enqueue_write(stream, CLEAR)

    def signal(self) -> None:
        """Set it, after all that the writer wrote: the device's copies have ended, stores of other
        threads were handed over to this one, and its own stores come before the release store."""
        self._flag.store(SET)

    @property
    def reusable(self) -> bool:
        """Always: the flag has no state but its value."""
        return True


class CudaReleaseFlag:
    """Set by a stream's write; read by the host."""

    def __init__(self, device: Device) -> None:
        self._flag = host_flag_pool(device).take()

    def set(self, stream: Any) -> None:
        """Enqueue the write."""
        self._flag.enqueue_write(stream, SET)

    def is_set(self) -> bool:
        """Whether the stream has set it."""
        return self._flag.value == SET

    def clear(self) -> None:
        """Clear it, from the host."""
        self._flag.store(CLEAR)


class CudaLockFlags:
    """Makes the flags of a device's stream locks."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def acquire_flag(self) -> CudaAcquireFlag:
        """A flag of 0."""
        return CudaAcquireFlag(self._device)

    def release_flag(self) -> CudaReleaseFlag:
        """A flag of 0."""
        return CudaReleaseFlag(self._device)
