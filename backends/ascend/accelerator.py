"""One NPU as an accelerator."""

import atexit
import platform
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from equipoise.backends.ascend import formats, memory, native
from equipoise.backends.ascend.event import AscendEvent
from equipoise.backends.ascend.gate import Gate
from equipoise.backends.ascend.graph import AscendGraph, sweep
from equipoise.backends.ascend.kernels import AscendKernels
from equipoise.backends.ascend.lock import AscendStreamLock
from equipoise.backends.ascend.lock_watch import Watch
from equipoise.backends.ascend.slots import AscendSlotStore
from equipoise.backends.ascend.stream import AscendStream
from equipoise.hal.accelerator import Memory, Topology
from equipoise.hal.errors import Unsupported
from equipoise.hal.page_pool import PagePool
from equipoise.hal.slots import SlotLayout
from equipoise.hal.stream import Role

CLOSING = 5.0
"""Seconds that closing waits for each stream."""


_open: weakref.WeakSet["AscendAccelerator"] = weakref.WeakSet()


def _close_all() -> None:
    for opened in list(_open):
        opened.close()


@cache
def _close_at_exit() -> None:
    """torch_npu waits for the device at the end of the process: no stream may wait for us then."""
    atexit.register(_close_all)


class AscendAccelerator:
    """The streams of one device, and the memory and locks that go with them.

    The vendor's streams live as long as the process; what is remembered about them does not.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._gate = Gate()
        self._watch = Watch(index)
        self._locks: weakref.WeakSet[AscendStreamLock] = weakref.WeakSet()
        self._streams = {role: self._stream(role, native.kept_stream(index, role)) for role in Role}
        self._adopted: dict[int, AscendStream] = {}
        self._kernels = AscendKernels()
        _open.add(self)
        _close_at_exit()

    @property
    def name(self) -> str:
        """The backend's name and the device's index."""
        return f"ascend:{self._index}"

    @property
    def device(self) -> torch.device:
        """Where its tensors live."""
        return torch.device(memory.DEVICE, self._index)

    @property
    def kernels(self) -> AscendKernels:
        """Operators of the device."""
        return self._kernels

    def stream(self, role: Role) -> AscendStream:
        """The stream of that role."""
        return self._streams[role]

    def adopt(self, native_stream: object) -> AscendStream:
        """Wrap a `torch.npu.Stream` of this device; the same one for the same stream.

        Raises `Unsupported` for an external stream, which torch_npu can neither record nor wait on.
        """
        stream: Any = native_stream
        external = isinstance(stream, native.npu().ExternalStream)
        if external or not isinstance(stream, torch.Stream) or stream.device != self.device:
            raise Unsupported(f"not a stream of {self.device} that torch_npu made: {stream!r}")
        names = ("stream_id", "device_index", "device_type")
        known = native.npu().Stream(**{name: getattr(stream, name) for name in names})
        with self._gate:
            for own in (*self._streams.values(), *self._adopted.values()):
                if own.wraps(known):
                    return own
            made = self._stream(Role.COMPUTE, known)
            return self._adopted.setdefault(int(stream.stream_id), made)

    def event(self) -> AscendEvent:
        """A fresh event."""
        return AscendEvent()

    def stream_lock(self, deadline: float) -> AscendStreamLock:
        """External events and a word of page-locked memory."""
        if not native.value_waits():
            raise Unsupported(f"this driver lacks {' and '.join(native.VALUE_CALLS)}")
        made = AscendStreamLock(self._index, deadline, self._watch)
        self._locks.add(made)
        return made

    def slot_store(self, layout: SlotLayout) -> AscendSlotStore:
        """Slots in device memory."""
        return AscendSlotStore(layout, self.device)

    def private(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory in FRACTAL_NZ."""
        return formats.private(shape, dtype, self.device)

    def stored(self, tensor: Tensor) -> Tensor:
        """All that its storage holds, as plain bytes."""
        return formats.stored(tensor)

    def pinned(self, nbytes: int) -> Tensor:
        """Page-locked host memory."""
        return memory.pinned(nbytes)

    def host_pool(self, page_bytes: int, pages: int) -> PagePool:
        """Page-locked host memory in pages."""
        return PagePool(self.pinned, page_bytes, pages)

    def graph(self) -> AscendGraph:
        """The vendor's graphs, and between them what only the host can do."""
        return AscendGraph()

    def topology(self) -> Topology:
        """The index and the machine; torch_npu tells no NUMA node."""
        return Topology(index=self._index, node=platform.node(), numa=-1)

    def memory(self) -> Memory:
        """As the driver counts it."""
        free, total = native.npu().mem_get_info(self._index)
        return Memory(total=total, free=free)

    def synchronize(self, timeout: float) -> None:
        """Drain every stream, and forget what has passed."""
        for stream in (*self._streams.values(), *self._adopted.values()):
            stream.synchronize(timeout)
        self._watch.look()
        sweep()

    def close(self) -> None:
        """Poison the locks, so that no stream waits for ever, and end every stream; bounded."""
        _open.discard(self)
        for lock in list(self._locks):
            lock.poison()
        for stream in (*self._streams.values(), *self._adopted.values()):
            stream.close(CLOSING)
        self._watch.stop()
        with suppress(RuntimeError):
            sweep()

    def _stream(self, role: Role, native_stream: Any) -> AscendStream:
        return AscendStream(role, f"{self.name}.{role}", self._index, native_stream, self._gate)
