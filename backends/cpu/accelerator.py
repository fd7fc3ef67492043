"""The host processor as an accelerator, with native kernels and checksums."""

from equipoise.backends.cpu.host import HostAccelerator, HostBackend
from equipoise.backends.cpu.kernels import CpuKernels
from equipoise.backends.cpu.slots import CpuSlotStore
from equipoise.hal.errors import BackendUnavailable
from equipoise.hal.slots import SlotLayout


class CpuAccelerator(HostAccelerator):
    """The host, with what `equipoise._native` does faster."""

    name = "cpu:0"

    def __init__(self) -> None:
        super().__init__()
        self._kernels = CpuKernels()

    def slot_store(self, layout: SlotLayout) -> CpuSlotStore:
        """Slots in host memory."""
        return CpuSlotStore(layout)


class CpuBackend(HostBackend):
    """The entry point `equipoise.accelerators: cpu`."""

    name = "cpu"

    def open(self, index: int) -> CpuAccelerator:
        """There is one CPU: index 0."""
        if index != 0:
            raise BackendUnavailable(f"the CPU backend has device 0 only, not {index}")
        return CpuAccelerator()
