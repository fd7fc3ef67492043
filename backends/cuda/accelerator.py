"""The CUDA accelerator: the entry point `equipoise.accelerators: cuda`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.backends.cuda import cuda_runtime, kernel_launcher
from equipoise.backends.cuda.byte_ops import CudaByteOps
from equipoise.backends.cuda.host_flags import CudaLockFlags
from equipoise.backends.devices.accelerator import DeviceAccelerator
from equipoise.backends.devices.runtime import Device
from equipoise.hal.capabilities import Capabilities, Probe, Unavailable
from equipoise.hal.errors import BackendUnavailable, Unsupported
from equipoise.hal.stream import Role
from equipoise.hal.support.numa import UNKNOWN_NODE

PCI = Path("/sys/bus/pci/devices")


class CudaDeviceOps:
    """What CUDA provides for one GPU."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.kernels = kernel_launcher.make_kernels(device)
        self.byte_ops = CudaByteOps(self.kernels.checksum_parts)

    def lock_flags(self) -> CudaLockFlags:
        """Flags in page-locked memory. Raises `Unsupported` without stream memory operations."""
        if why := cuda_runtime.stream_memory():
            raise Unsupported(why)
        return CudaLockFlags(self._device)

    def empty_private(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Raises `Unsupported`: CUDA has no private formats."""
        raise Unsupported(f"no private format is declared for {dtype} {list(shape)}")

    def storage_bytes(self, tensor: Tensor) -> Tensor:
        """The bytes of its elements."""
        return tensor.detach().reshape(-1).view(torch.uint8)

    def numa_node(self) -> int:
        """The NUMA node of the GPU's PCI slot, as the system reports it."""
        return numa_node(cuda_runtime.cuda().get_device_properties(self._device.index))


class CudaAccelerator(DeviceAccelerator):
    """The streams of one GPU, and the memory and locks that go with them."""

    def __init__(self, index: int) -> None:
        device = Device(cuda_runtime.RUNTIME, index)
        super().__init__("cuda", device, CudaDeviceOps(device))


def numa_node(properties: Any, root: Path = PCI) -> int:
    """The NUMA node of a device; `UNKNOWN_NODE` where torch or the system does not know it.

    Args:
        properties: as torch gives them, with the place on the bus from torch 2.9 on.
        root: where the kernel lists devices.
    """
    try:
        domain, bus = properties.pci_domain_id, properties.pci_bus_id
        place = f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"
        return max(int((root / place / "numa_node").read_text(encoding="ascii")), UNKNOWN_NODE)
    except (AttributeError, OSError, ValueError):
        return UNKNOWN_NODE


class CudaBackend:
    """NVIDIA GPUs through torch.cuda."""

    name = "cuda"
    communicator = "nccl"

    @property
    def capabilities(self) -> Capabilities:
        """What torch and cuda-bindings that are installed here can do.

        The device's front end waits for a value: it blocks the stream, takes no multiprocessor, and
        does not affect the copy engines. But it also blocks what is queued after it in the same
        hardware queue, so copies are independent only if streams share no queue.
        """
        locks = not cuda_runtime.stream_memory()
        return Capabilities(
            streams=len(Role),
            stream_lock=locks,
            copy_independent_of_launch=locks and not cuda_runtime.shared_queues(),
            graph_capture=True,
            kernel_capture=True,
            pinned_memory=True,
        )

    def probe(self) -> Probe:
        """Whether a CUDA build of torch is here, and a device; in one line why not."""
        return cuda_runtime.probe()

    def devices(self) -> int:
        """How many devices can be opened."""
        return 0 if isinstance(self.probe(), Unavailable) else cuda_runtime.RUNTIME.devices()

    def open(self, index: int) -> CudaAccelerator:
        """Open that device, and make it the calling thread's."""
        answer = self.probe()
        if isinstance(answer, Unavailable):
            raise BackendUnavailable(answer.reason)
        device_count = cuda_runtime.RUNTIME.devices()
        if not 0 <= index < device_count:
            raise BackendUnavailable(
                f"there are {device_count} device(s), from 0: no device {index}"
            )
        cuda_runtime.RUNTIME.select_device(index)
        return CudaAccelerator(index)
