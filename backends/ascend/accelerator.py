"""One NPU as an accelerator."""

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.backends.ascend import formats, native
from equipoise.backends.ascend.byte_verbs import NpuBytes
from equipoise.backends.ascend.kernels import AscendKernels
from equipoise.backends.ascend.replica_tables import table_bytes
from equipoise.backends.ascend.words import NpuWords
from equipoise.backends.devices.accelerator import DeviceAccelerator
from equipoise.backends.devices.runtime import Device
from equipoise.hal.errors import Unsupported


class AscendParts:
    """What torch_npu brings for one NPU."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.kernels = AscendKernels()
        self.verbs = NpuBytes()

    def words(self) -> NpuWords:
        """External events and a word of page-locked memory."""
        if not native.value_waits():
            raise Unsupported(f"this driver lacks {' and '.join(native.VALUE_CALLS)}")
        return NpuWords(self._device)

    def private(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory in FRACTAL_NZ."""
        return formats.private(shape, dtype, self._device.torch)

    def stored(self, tensor: Tensor) -> Tensor:
        """All that its storage holds, as plain bytes."""
        return formats.stored(tensor)

    def numa(self) -> int:
        """Torch_npu tells none."""
        return -1


class AscendAccelerator(DeviceAccelerator):
    """The streams of one NPU, and the memory and locks that go with them."""

    def __init__(self, index: int) -> None:
        device = Device(native.RUNTIME, index)
        super().__init__("ascend", device, AscendParts(device))

    def routing_bytes(self, layers: int, experts: int, slots: int) -> int:
        """Of the tables of replicas."""
        return table_bytes(layers, experts, slots)
