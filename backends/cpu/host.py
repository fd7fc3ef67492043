"""The host processor as an accelerator, with the kernels and checksums of the reference.

It needs no native code: communicators are judged on it where the native core is not installed.
"""

import os
import platform
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.backends.cpu.host_slots import HostSlotStore
from equipoise.backends.cpu.lock import CpuStreamLock
from equipoise.backends.cpu.stream import CpuEvent, CpuGraph, CpuStream
from equipoise.hal.accelerator import Memory, Topology
from equipoise.hal.capabilities import Available, Capabilities, Probe
from equipoise.hal.errors import BackendUnavailable, Unsupported
from equipoise.hal.slots import SlotLayout
from equipoise.hal.stream import Role
from equipoise.hal.support.numa import numa_node
from equipoise.hal.support.page_pool import PagePool
from equipoise.hal.support.reference_kernels import ReferenceKernels

CLOSE_TIMEOUT = 5.0
"""Maximum seconds that closing waits for each stream's worker, which may hang in a program; it is a
daemon thread then."""


class HostAccelerator:
    """The host as an accelerator: one worker thread per stream, and host memory."""

    name = "host:0"
    device = torch.device("cpu")

    def __init__(self) -> None:
        issue_lock = threading.RLock()
        self._streams = {role: CpuStream(role, self.name, issue_lock) for role in Role}
        self._kernels = ReferenceKernels()

    @property
    def kernels(self) -> ReferenceKernels:
        """The reference, in torch."""
        return self._kernels

    def stream(self, role: Role) -> CpuStream:
        """The stream of that role."""
        return self._streams[role]

    def adopt(self, native_stream: object) -> CpuStream:
        """The CPU has no foreign streams."""
        raise Unsupported(f"the CPU has no native stream to adopt: {native_stream!r}")

    def event(self) -> CpuEvent:
        """A fresh event."""
        return CpuEvent()

    def stream_lock(self, deadline: float) -> CpuStreamLock:
        """A condition variable."""
        return CpuStreamLock(deadline)

    def slot_store(self, layout: SlotLayout) -> HostSlotStore:
        """Slots in host memory."""
        return HostSlotStore(layout)

    def empty_private(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The CPU knows no private format."""
        raise Unsupported(f"no private format is declared for {dtype} {list(shape)}")

    def storage_bytes(self, tensor: Tensor) -> Tensor:
        """Its elements: nothing else is stored."""
        return tensor.detach().reshape(-1).view(torch.uint8)

    def pinned(self, nbytes: int) -> Tensor:
        """Plain host memory: here the host is the device. Any thread may write to it."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8)

    def host_pool(self, page_bytes: int, pages: int) -> PagePool:
        """Plain host memory in pages."""
        return PagePool(self.pinned, page_bytes, pages)

    def graph(self) -> CpuGraph:
        """A list of launches."""
        return CpuGraph()

    def topology(self) -> Topology:
        """This machine; its NUMA node where the process may run on one only."""
        return Topology(index=0, node=platform.node(), numa=numa_node())

    def memory(self) -> Memory:
        """Physical memory of the machine."""
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_AVPHYS_PAGES")
        return Memory(total=total * page, free=free * page)

    def synchronize(self, timeout: float) -> None:
        """Drain every stream."""
        for stream in self._streams.values():
            stream.synchronize(timeout)

    def close(self) -> None:
        """End every worker."""
        for stream in self._streams.values():
            stream.close(CLOSE_TIMEOUT)


class HostBackend:
    """The entry point `equipoise.accelerators: host` of `equipoise-conformance`."""

    name = "host"
    communicator = "gloo"

    @property
    def capabilities(self) -> Capabilities:
        """Four real threads; a host copy never waits for a launch."""
        return Capabilities(
            streams=len(Role),
            stream_lock=True,
            copy_independent_of_launch=True,
            graph_capture=True,
            kernel_capture=True,
        )

    def probe(self) -> Probe:
        """Always there."""
        return Available(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores")

    def devices(self) -> int:
        """One, which any number of ranks may open at once."""
        return 1

    def open(self, index: int) -> HostAccelerator:
        """There is one CPU: index 0."""
        if index != 0:
            raise BackendUnavailable(f"the CPU backend has device 0 only, not {index}")
        return HostAccelerator()


HOST = HostBackend()
