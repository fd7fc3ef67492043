"""One GPU as an accelerator."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.backends.cuda import launching, native
from equipoise.backends.cuda.byte_verbs import CudaBytes
from equipoise.backends.cuda.words import CudaWords
from equipoise.backends.devices.accelerator import DeviceAccelerator
from equipoise.backends.devices.runtime import Device
from equipoise.hal.errors import Unsupported
from equipoise.hal.numa import UNKNOWN

PCI = Path("/sys/bus/pci/devices")


class CudaParts:
    """What CUDA brings for one GPU."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.kernels = launching.make_kernels(device)
        self.verbs = CudaBytes(self.kernels.fingerprint)

    def words(self) -> CudaWords:
        """Page-locked words that streams wait for and write."""
        if why := native.stream_memory():
            raise Unsupported(why)
        return CudaWords(self._device)

    def private(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """CUDA knows none."""
        raise Unsupported(f"no private format is declared for {dtype} {list(shape)}")

    def stored(self, tensor: Tensor) -> Tensor:
        """Its elements: nothing else is stored."""
        return tensor.detach().reshape(-1).view(torch.uint8)

    def numa(self) -> int:
        """As the system says of the slot that the GPU is plugged into."""
        return numa_node(native.cuda().get_device_properties(self._device.index))


class CudaAccelerator(DeviceAccelerator):
    """The streams of one GPU, and the memory and locks that go with them."""

    def __init__(self, index: int) -> None:
        device = Device(native.RUNTIME, index)
        super().__init__("cuda", device, CudaParts(device))


def numa_node(properties: Any, root: Path = PCI) -> int:
    """The NUMA node of a device; `UNKNOWN` where torch or the system does not say.

    Args:
        properties: as torch gives them, with the place on the bus from torch 2.9 on.
        root: where the kernel lists devices.
    """
    try:
        domain, bus = properties.pci_domain_id, properties.pci_bus_id
        place = f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"
        return max(int((root / place / "numa_node").read_text(encoding="ascii")), UNKNOWN)
    except (AttributeError, OSError, ValueError):
        return UNKNOWN
