"""The virtual accelerator: streams, locks, slots and memory of one rank's device."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.backends.virtual.event import VirtualEvent
from equipoise.backends.virtual.kernels import VirtualKernels
from equipoise.backends.virtual.lock import VirtualStreamLock
from equipoise.backends.virtual.slots import VirtualSlotStore
from equipoise.backends.virtual.stream import VirtualGraph, VirtualStream
from equipoise.hal.accelerator import Memory, Topology
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.errors import PoolExhausted, StreamFailed, Unsupported
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role
from equipoise.hal.support.page_pool import PagePool, PoolPage

if TYPE_CHECKING:
    from equipoise.backends.virtual.device import VirtualDevice


class VirtualPagePool(PagePool):
    """The host pool (clause A13) in a world without a clock."""

    def __init__(self, device: "VirtualDevice", page_bytes: int, pages: int) -> None:
        super().__init__(device.arena.empty, page_bytes, pages)
        self._device = device

    def take(self, timeout: float) -> PoolPage:
        """A page that no copy reads any more."""
        pages: list[PoolPage] = []

        def look() -> bool:
            page = self._free()
            if page is not None:
                pages.append(page)
            return page is not None

        if not self._device.world.until(look, timeout):
            raise PoolExhausted(f"no page became free within {timeout:g} s")
        return pages[0]


if TYPE_CHECKING:
    from equipoise.backends.virtual.device import VirtualDevice

MEMORY = 1 << 34
"""Bytes that the device says it has; blocks are taken from the host as they are needed."""
PADDING = 32
"""Bytes that the private format stores after its elements."""
CLOSE_TIMEOUT = 5.0
"""Nominal seconds that closing waits for the streams."""


class VirtualAccelerator:
    """One device of a world."""

    device = torch.device("cpu")

    def __init__(self, device: "VirtualDevice") -> None:
        self._device = device
        self._kernels = device.parts.kernels(device)

    @property
    def name(self) -> str:
        """The backend and the rank."""
        return self._device.name

    @property
    def kernels(self) -> VirtualKernels:
        """The small kernels."""
        return self._kernels

    def stream(self, role: Role) -> VirtualStream:
        """The stream of that role."""
        return self._device.stream(role)

    def adopt(self, native_stream: object) -> VirtualStream:
        """There are no foreign streams."""
        raise Unsupported(f"no engine owns streams of a virtual device: {native_stream!r}")

    def event(self) -> VirtualEvent:
        """A fresh event."""
        return self._device.event()

    def stream_lock(self, deadline: float) -> VirtualStreamLock:
        """A fresh lock."""
        if not self._device.declared.stream_lock:
            raise Unsupported(f"{self.name} declares no stream lock")
        return self._device.parts.lock(self._device, deadline)

    def slot_store(self, layout: SlotLayout) -> VirtualSlotStore:
        """The slots of this rank."""
        return self._device.parts.slots(self._device, layout)

    def empty_private(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the arena whose storage goes on after the elements."""
        nbytes = prod(shape) * dtype.itemsize
        whole = self._device.arena.empty(nbytes + PADDING)
        return whole[:nbytes].view(dtype).view(tuple(shape))

    def storage_bytes(self, tensor: Tensor) -> Tensor:
        """Its whole storage."""
        return Segment("", tensor, SlotFormat.PRIVATE).bytes

    def pinned(self, nbytes: int) -> Tensor:
        """Memory of the arena, uint8 [nbytes]: every page of it can be reached by the device."""
        return self._device.arena.empty(nbytes)

    def host_pool(self, page_bytes: int, pages: int) -> VirtualPagePool:
        """Pages of the arena."""
        return self._device.parts.pool(self._device, page_bytes, pages)

    def graph(self) -> VirtualGraph:
        """An empty graph."""
        if not self._device.declared.graph_capture:
            raise Unsupported(f"{self.name} captures no graphs")
        return self._device.parts.graph(self._device)

    def topology(self) -> Topology:
        """All devices sit on one node."""
        return Topology(index=self._device.rank, node="virtual", numa=-1)

    def memory(self) -> Memory:
        """What it says it has."""
        lent_bytes = self._device.arena.bytes_lent
        return Memory(total=MEMORY, free=MEMORY - lent_bytes)

    def synchronize(self, timeout: float) -> None:
        """Drain every stream."""
        for stream in self._device.streams:
            stream.synchronize(timeout)

    def close(self) -> None:
        """Let what can still move end; skip the rest; every later launch is refused (E5)."""
        self._device.world.until(lambda: self._device.tasks == 0, CLOSE_TIMEOUT)
        for role in Role:  # those too that nobody has asked for yet
            self._device.stream(role).fail(StreamFailed(f"{self.name} was closed"))
