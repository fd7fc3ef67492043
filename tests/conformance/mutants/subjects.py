"""Backends with some parts replaced: virtual ones on schedules, and the CPU's on real threads."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from helpers.processes.thread_rank_group import ThreadSubject

from equipoise.backends.cpu import BACKEND as CPU
from equipoise.backends.cpu import GLOO
from equipoise.backends.cpu.accelerator import CpuAccelerator, CpuBackend
from equipoise.backends.cpu.gloo import GlooBackend, GlooFabric
from equipoise.backends.cpu.gloo_communicator import GlooCommunicator
from equipoise.backends.cpu.gloo_work import GlooWork
from equipoise.backends.cpu.kernels import CpuKernels
from equipoise.backends.cpu.lock import CpuStreamLock
from equipoise.backends.cpu.slots import CpuSlotStore
from equipoise.backends.cpu.stream import CpuEvent, CpuGraph, CpuStream
from equipoise.backends.virtual.backend import ALL_CAPABILITIES, HEALTHY, VirtualBackend
from equipoise.hal.capabilities import Capabilities
from equipoise.hal.communicator import Rendezvous
from equipoise.hal.conformance.executors.controlled import ControlledSubject
from equipoise.hal.conformance.executors.device import DeviceSubject
from equipoise.hal.conformance.subject import Subject
from equipoise.hal.expert_parallel import ExpertParallelLibrary
from equipoise.hal.slots import SlotLayout
from equipoise.hal.stream import Role
from equipoise.hal.support.page_pool import PagePool


def device_with(
    capabilities: Capabilities = ALL_CAPABILITIES, **parts: type
) -> Callable[[], Subject]:
    """Devices that are healthy except for these parts: for properties of one rank."""

    def subject() -> Subject:
        backend = VirtualBackend(dataclasses.replace(HEALTHY, **parts), capabilities)
        return ControlledSubject(backend)

    return subject


def network_with(**parts: type) -> Callable[[], Subject]:
    """Ranks that are healthy, with the network between them, except for these parts."""

    def subject() -> Subject:
        backend = VirtualBackend(dataclasses.replace(HEALTHY, **parts))
        return ControlledSubject(backend)

    return subject


@dataclass(frozen=True, kw_only=True)
class CpuParts:
    """One class for each part of the CPU and of gloo."""

    accelerator: type[CpuAccelerator] = CpuAccelerator
    stream: type[CpuStream] = CpuStream
    event: type[CpuEvent] = CpuEvent
    lock: type[CpuStreamLock] = CpuStreamLock
    graph: type[CpuGraph] = CpuGraph
    slots: type[CpuSlotStore] = CpuSlotStore
    kernels: type[CpuKernels] = CpuKernels
    pool: type[PagePool] = PagePool
    communicator: type[GlooCommunicator] = GlooCommunicator


class BrokenCpu(CpuBackend):
    """The CPU made from other parts."""

    def __init__(self, parts: CpuParts) -> None:
        self._parts = parts

    def open(self, index: int) -> CpuAccelerator:
        """Made as the healthy one, with the parts put in their places."""
        parts = self._parts

        class Accelerator(parts.accelerator):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                super().__init__()
                condition = threading.RLock()
                self._streams = {role: parts.stream(role, self.name, condition) for role in Role}
                self._kernels = parts.kernels()

            def event(self) -> CpuEvent:
                return parts.event()

            def stream_lock(self, deadline: float) -> CpuStreamLock:
                return parts.lock(deadline)

            def slot_store(self, layout: SlotLayout) -> CpuSlotStore:
                return parts.slots(layout)

            def host_pool(self, page_bytes: int, pages: int) -> PagePool:
                return parts.pool(self.pinned, page_bytes, pages)

            def graph(self) -> CpuGraph:
                return parts.graph()

        return Accelerator()


class BrokenGloo(GlooBackend):
    """Gloo with another communicator."""

    def __init__(self, communicator: type[GlooCommunicator]) -> None:
        self._communicator = communicator

    def connect(self, rendezvous: Rendezvous) -> GlooFabric:
        """A fabric that opens the broken one."""
        kind = self._communicator

        class Fabric(GlooFabric):
            def open(self, purpose: str, ranks: Sequence[int] | None = None) -> GlooCommunicator:
                where = self._where
                members = tuple(range(where.size) if ranks is None else ranks)
                fabric = kind(self._control.store, purpose, members, where.rank, where.deadline)
                self._open.append(fabric)
                return fabric

        return Fabric(rendezvous)


def cpu_with(**parts: type) -> Callable[[], Subject]:
    """The CPU as a device, healthy except for these parts: for properties of one rank."""
    return lambda: DeviceSubject(BrokenCpu(CpuParts(**parts)))


def gloo_with(work: type[GlooWork] | None = None, **parts: type) -> Callable[[], Subject]:
    """Two ranks on the CPU and gloo, healthy except for these parts or this kind of handle."""
    if work is not None:
        parts = {**parts, "communicator": _communicator_of(work)}

    def subject() -> Subject:
        cpu_parts = CpuParts(**parts)
        return ThreadSubject(BrokenCpu(cpu_parts), BrokenGloo(cpu_parts.communicator))

    return subject


def library_with(library: ExpertParallelLibrary) -> Callable[[], Subject]:
    """An expert-parallel library on healthy virtual ranks."""
    return lambda: ControlledSubject(VirtualBackend(), library)


def gloo_library_with(library: ExpertParallelLibrary) -> Callable[[], Subject]:
    """An expert-parallel library on two healthy ranks of the CPU and gloo."""
    return lambda: ThreadSubject(CPU, GLOO, library)


def _communicator_of(work: type[GlooWork]) -> type[GlooCommunicator]:
    """Communicators whose handles are of that kind."""

    class BrokenCommunicator(GlooCommunicator):
        def _work(self, natives, what, buffers):  # type: ignore[no-untyped-def]
            gloo_work = super()._work(natives, what, buffers)
            gloo_work.__class__ = work
            return gloo_work

    return BrokenCommunicator
