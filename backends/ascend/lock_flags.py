"""The flags of stream locks on an NPU: external events, and page-locked memory."""

from typing import Any

import torch
from torch import Tensor

from equipoise.backends.ascend import npu_runtime
from equipoise.backends.devices.memory import copy, pinned
from equipoise.backends.devices.runtime import Device

SIGNAL_STREAM = "signal"
"""Use of the cached stream that signals are launched on. Nothing ever waits there, so that a signal
is never delayed by a stream that waits."""


class NpuAcquireFlag:
    """An external event of the vendor: a wait ends when its value is 1, and then writes 0.

    torch_npu keeps a mark per event on the host: a wait sets it, a record clears it, and a wait
    that finds it set raises, although it has gone to the stream. So an event that was recorded
    before its wait, or at the same time, keeps a mark that only another record clears; it is not
    reused.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._event: Any = npu_runtime.npu().ExternalEvent()
        self._awaited = False
        self._reusable = False

    @property
    def reusable(self) -> bool:
        """Whether the wait was issued before the signal, so that torch_npu's mark is clear."""
        return self._reusable

    def wait(self, stream: Any) -> None:
        """Enqueue the wait."""
        # Set after the call: a signal of another thread during it counts as one before the wait.
        self._reusable = False
        self._event.wait(stream)
        self._awaited = True

    def signal(self) -> None:
        """Record the event, on the signal stream."""
        self._reusable, self._awaited = self._awaited, False
        self._device.set_current()
        self._event.record(self._device.cached_stream(SIGNAL_STREAM))


class NpuReleaseFlag:
    """An int32 in page-locked memory that a stream copies a 1 into."""

    def __init__(self, device: Device) -> None:
        self._flag = pinned(4).view(torch.int32).zero_()
        self._one = one_on_device(device)

    def set(self, stream: Any) -> None:
        """Enqueue the copy on the current stream."""
        copy(self._flag, self._one)

    def is_set(self) -> bool:
        """Whether the copy has arrived."""
        return int(self._flag) == 1

    def clear(self) -> None:
        """Clear it, from the host."""
        self._flag.zero_()


class NpuLockFlags:
    """Makes the flags of a device's stream locks."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def acquire_flag(self) -> NpuAcquireFlag:
        """An external event."""
        return NpuAcquireFlag(self._device)

    def release_flag(self) -> NpuReleaseFlag:
        """A flag of 0."""
        return NpuReleaseFlag(self._device)


_ones: dict[int, Tensor] = {}


def one_on_device(device: Device) -> Tensor:
    """The number 1 on that device, int32 [1]. Blocks until it is there, so that any stream may read
    it without waiting."""
    if device.index not in _ones:
        stream = device.cached_stream(SIGNAL_STREAM)
        with device.runtime.current(stream):
            tensor = torch.ones(1, dtype=torch.int32, pin_memory=True).to(device.torch)
        stream.synchronize()
        _ones[device.index] = tensor
    return _ones[device.index]
