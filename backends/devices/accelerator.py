"""The accelerator of a device: its streams, locks, slots, graphs and memory."""

import atexit
import platform
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from equipoise.backends.devices import memory
from equipoise.backends.devices.event import DeviceEvent
from equipoise.backends.devices.graph import DeviceGraph, release_dropped
from equipoise.backends.devices.issue_lock import IssueLock
from equipoise.backends.devices.lock import DeviceStreamLock, LockWatchdog
from equipoise.backends.devices.lock_flags import LockFlags
from equipoise.backends.devices.runtime import Device
from equipoise.backends.devices.slots import ByteOps, DeviceSlotStore
from equipoise.backends.devices.stream import DeviceStream
from equipoise.hal.accelerator import Memory, Topology
from equipoise.hal.kernels import Kernels
from equipoise.hal.slots import SlotLayout
from equipoise.hal.stream import Role
from equipoise.hal.support.page_pool import PagePool

CLOSE_TIMEOUT = 5.0
"""Maximum seconds that closing waits for each stream. Its locks are poisoned first, so a healthy
stream ends at once; this bounds a device that hangs."""


class DeviceOps(Protocol):
    """What a vendor provides for a device, besides its `DeviceRuntime`."""

    @property
    def kernels(self) -> Kernels:
        """The small kernels."""
        ...

    @property
    def byte_ops(self) -> ByteOps:
        """Copies and checksums of bytes."""
        ...

    def lock_flags(self) -> LockFlags:
        """The flags of stream locks. Raises `Unsupported`."""
        ...

    def empty_private(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory in the private format. Raises `Unsupported`."""
        ...

    def storage_bytes(self, tensor: Tensor) -> Tensor:
        """All that its storage holds, as plain bytes."""
        ...

    def numa_node(self) -> int:
        """The NUMA node of the device; -1 where the system does not know it."""
        ...


_open: weakref.WeakSet["DeviceAccelerator"] = weakref.WeakSet()


def _close_all() -> None:
    for accelerator in list(_open):
        accelerator.close()


@cache
def _close_at_exit() -> None:
    """A vendor waits for the device at the end of the process: no stream may wait for us then."""
    atexit.register(_close_all)


class DeviceAccelerator:
    """The streams of one device, and the memory and locks that go with them.

    The vendor's streams live as long as the process; what is remembered about them does not.

    Args:
        backend: its name.
        device: the device.
        parts: what the vendor brings for it.
    """

    def __init__(self, backend: str, device: Device, parts: DeviceOps) -> None:
        self._name = f"{backend}:{device.index}"
        self._device = device
        self._ops = parts
        self._issue_lock = IssueLock()
        self._lock_watchdog = LockWatchdog(device)
        self._locks: weakref.WeakSet[DeviceStreamLock] = weakref.WeakSet()
        self._streams = {role: self._stream(role, device.cached_stream(role)) for role in Role}
        self._adopted: list[DeviceStream] = []
        _open.add(self)
        _close_at_exit()

    @property
    def name(self) -> str:
        """The backend's name and the device's index."""
        return self._name

    @property
    def device(self) -> torch.device:
        """Where its tensors live."""
        return self._device.torch

    @property
    def kernels(self) -> Kernels:
        """The small kernels."""
        return self._ops.kernels

    def stream(self, role: Role) -> DeviceStream:
        """The stream of that role."""
        return self._streams[role]

    def adopt(self, native_stream: object) -> DeviceStream:
        """Wrap a stream that an engine owns; the same one for the same stream."""
        runtime_stream = self._device.runtime.wrap_stream(self._device.index, native_stream)
        with self._issue_lock:
            for own in (*self._streams.values(), *self._adopted):
                if own.wraps(runtime_stream):
                    return own
            self._adopted.append(self._stream(Role.COMPUTE, runtime_stream, adopted=True))
            return self._adopted[-1]

    def event(self) -> DeviceEvent:
        """A fresh event."""
        return DeviceEvent()

    def stream_lock(self, deadline: float) -> DeviceStreamLock:
        """A lock between the device's streams and a writer."""
        lock = DeviceStreamLock(self._ops.lock_flags(), deadline, self._lock_watchdog)
        self._locks.add(lock)
        return lock

    def slot_store(self, layout: SlotLayout) -> DeviceSlotStore:
        """Slots in device memory."""
        return DeviceSlotStore(layout, self._device, self._ops.byte_ops)

    def empty_private(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory in the vendor's private format."""
        return self._ops.empty_private(shape, dtype)

    def storage_bytes(self, tensor: Tensor) -> Tensor:
        """All that its storage holds, as plain bytes."""
        return self._ops.storage_bytes(tensor)

    def pinned(self, nbytes: int) -> Tensor:
        """Page-locked host memory."""
        return memory.pinned(nbytes)

    def host_pool(self, page_bytes: int, pages: int) -> PagePool:
        """Page-locked host memory in pages."""
        return PagePool(self.pinned, page_bytes, pages)

    def graph(self) -> DeviceGraph:
        """An empty graph."""
        return DeviceGraph(self._device.runtime)

    def topology(self) -> Topology:
        """The index, the machine and the NUMA node."""
        return Topology(self._device.index, platform.node(), self._ops.numa_node())

    def memory(self) -> Memory:
        """As the driver counts it."""
        free, total = self._device.runtime.free_memory(self._device.index)
        return Memory(total=total, free=free)

    def synchronize(self, timeout: float) -> None:
        """Block until every stream is idle, and free what has passed."""
        for stream in (*self._streams.values(), *self._adopted):
            stream.synchronize(timeout)
        self._lock_watchdog.check_all()
        release_dropped()

    def close(self) -> None:
        """Poison the locks, so that no stream waits for ever, then close every stream. Waits at
        most `CLOSE_TIMEOUT` per stream."""
        _open.discard(self)
        for lock in list(self._locks):
            lock.poison()
        for stream in (*self._streams.values(), *self._adopted):
            stream.close(CLOSE_TIMEOUT)
        # After the streams: until then it delivers signals to poisoned acquires.
        self._lock_watchdog.stop()
        with suppress(RuntimeError):
            release_dropped()

    def _stream(self, role: Role, native_stream: Any, adopted: bool = False) -> DeviceStream:
        name = f"{self.name}.{'adopted' if adopted else role}"
        return DeviceStream(role, name, self._device, native_stream, self._issue_lock, adopted)
