"""The Ascend accelerator: the entry point `equipoise.accelerators: ascend`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.backends.ascend import byte_ops, npu_runtime
from equipoise.backends.ascend.byte_ops import NpuByteOps
from equipoise.backends.ascend.kernels import AscendKernels
from equipoise.backends.ascend.lock_flags import NpuLockFlags
from equipoise.backends.ascend.lookup_tables import table_bytes
from equipoise.backends.devices.accelerator import DeviceAccelerator
from equipoise.backends.devices.runtime import Device
from equipoise.hal.capabilities import Capabilities, Probe, SlotFormat, Unavailable
from equipoise.hal.errors import BackendUnavailable, Unsupported
from equipoise.hal.stream import Role


class AscendDeviceOps:
    """What torch_npu provides for one NPU."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.kernels = AscendKernels()
        self.byte_ops = NpuByteOps()

    def lock_flags(self) -> NpuLockFlags:
        """External events, and flags in page-locked memory. Raises `Unsupported` on older
        drivers."""
        if not npu_runtime.value_waits():
            raise Unsupported(f"this driver lacks {' and '.join(npu_runtime.VALUE_CALLS)}")
        return NpuLockFlags(self._device)

    def empty_private(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory in FRACTAL_NZ."""
        return byte_ops.empty_private(shape, dtype, self._device.torch)

    def storage_bytes(self, tensor: Tensor) -> Tensor:
        """All that its storage holds, as plain bytes."""
        return byte_ops.storage_bytes(tensor)

    def numa_node(self) -> int:
        """-1: torch_npu does not report it."""
        return -1


class AscendAccelerator(DeviceAccelerator):
    """The streams of one NPU, and the memory and locks that go with them."""

    def __init__(self, index: int) -> None:
        device = Device(npu_runtime.RUNTIME, index)
        super().__init__("ascend", device, AscendDeviceOps(device))

    def routing_bytes(self, layers: int, experts: int, slots: int) -> int:
        """Of the tables of replicas."""
        return table_bytes(layers, experts, slots)


class AscendBackend:
    """Ascend NPUs through torch_npu."""

    name = "ascend"
    communicator = "hccl"

    @property
    def capabilities(self) -> Capabilities:
        """What torch_npu and the driver that are installed here can do.

        Streams are the hardware's own, so a wait for a value blocks its stream and nothing else.
        """
        locks, graphs = npu_runtime.value_waits(), not npu_runtime.RUNTIME.why_uncapturable()
        return Capabilities(
            streams=len(Role),
            stream_lock=locks,
            copy_independent_of_launch=locks,
            graph_capture=graphs,
            kernel_capture=graphs,
            pinned_memory=True,
            slot_formats=frozenset(SlotFormat),
        )

    def probe(self) -> Probe:
        """Whether torch_npu and CANN are here, and a device; in one line why not."""
        return npu_runtime.probe()

    def devices(self) -> int:
        """How many devices can be opened."""
        return 0 if isinstance(self.probe(), Unavailable) else npu_runtime.RUNTIME.devices()

    def routing_bytes(self, layers: int, experts: int, slots: int) -> int:
        """Of the tables of replicas."""
        return table_bytes(layers, experts, slots)

    def open(self, index: int) -> AscendAccelerator:
        """Open that device, and make it the calling thread's."""
        answer = self.probe()
        if isinstance(answer, Unavailable):
            raise BackendUnavailable(answer.reason)
        device_count = npu_runtime.RUNTIME.devices()
        if not 0 <= index < device_count:
            raise BackendUnavailable(
                f"there are {device_count} device(s), from 0: no device {index}"
            )
        npu_runtime.RUNTIME.select_device(index)
        return AscendAccelerator(index)
