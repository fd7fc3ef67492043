"""The backend, and the device that it opens."""

import os
import platform
from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.hal import (
    Available,
    Capabilities,
    Graph,
    Memory,
    Role,
    SlotLayout,
    StreamLock,
    Topology,
)
from equipoise.hal.errors import BackendUnavailable, Unsupported
from equipoise.hal.support import page_pool, reference_kernels
from equipoise_inline.slots import InlineSlotStore
from equipoise_inline.stream import InlineEvent, InlineStream


class InlineAccelerator:
    """The host, without a queue."""

    name = "inline:0"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._streams = {role: InlineStream(role) for role in Role}
        self.kernels = reference_kernels.ReferenceKernels()

    def stream(self, role: Role) -> InlineStream:
        """The stream of that role."""
        return self._streams[role]

    def adopt(self, native_stream: object) -> InlineStream:
        """There is nothing to adopt."""
        raise Unsupported(f"no foreign streams here: {native_stream!r}")

    def event(self) -> InlineEvent:
        """A fresh event."""
        return InlineEvent()

    def stream_lock(self, deadline: float) -> StreamLock:
        """A stream that is the caller cannot wait for the caller."""
        raise Unsupported("no stream lock is declared")

    def slot_store(self, layout: SlotLayout) -> InlineSlotStore:
        """Slots in host memory."""
        return InlineSlotStore(layout)

    def empty_private(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The host knows no private format."""
        raise Unsupported(f"no private format is declared for {dtype} {list(shape)}")

    def storage_bytes(self, tensor: Tensor) -> Tensor:
        """Its elements: nothing else is stored."""
        return tensor.detach().reshape(-1).view(torch.uint8)

    def pinned(self, nbytes: int) -> Tensor:
        """Plain host memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def host_pool(self, page_bytes: int, pages: int) -> page_pool.PagePool:
        """So many pages of it."""
        return page_pool.PagePool(self.pinned, page_bytes, pages)

    def graph(self) -> Graph:
        """Nothing can be captured."""
        raise Unsupported("no graph capture is declared")

    def topology(self) -> Topology:
        """This machine."""
        return Topology(index=0, node=platform.node(), numa=-1)

    def memory(self) -> Memory:
        """Physical memory of the machine."""
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_AVPHYS_PAGES")
        return Memory(total=total * page, free=free * page)

    def synchronize(self, timeout: float) -> None:
        """Everything has run; a stream that failed says so."""
        for stream in self._streams.values():
            stream.synchronize(timeout)

    def close(self) -> None:
        """Take nothing more (clause E5); there is nothing to wait for."""
        for stream in self._streams.values():
            stream.close()


class InlineBackend:
    """The entry point `equipoise.accelerators: inline`."""

    name = "inline"
    communicator = "gloo"
    capabilities = Capabilities()

    def probe(self) -> Available:
        """Always there."""
        return Available("the calling thread")

    def devices(self) -> int:
        """One, which any number of ranks may open."""
        return 1

    def open(self, index: int) -> InlineAccelerator:
        """There is one."""
        if index != 0:
            raise BackendUnavailable(f"the inline backend has device 0 only, not {index}")
        return InlineAccelerator()
