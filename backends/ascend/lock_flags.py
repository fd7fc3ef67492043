"""The two words of a stream lock on an NPU."""

from typing import Any

import torch
from torch import Tensor

from equipoise.backends.ascend import npu_runtime
from equipoise.backends.devices.memory import copy, pinned
from equipoise.backends.devices.runtime import Device

SIGNAL_STREAM = "signal"
"""The stream that signals are given on; nothing ever waits there, so a signal is never late."""


class NpuAcquireFlag:
    """A vendor's external event: its wait ends when the word is 1, and then writes 0.

    torch_npu has a flag for each on the host: a wait sets it, a record clears it, and a wait that
    finds it set raises, though it has gone to the stream. So a word that was given before its wait,
    or beside it, keeps a flag that nothing but another signal clears, and is not lent again.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._event: Any = npu_runtime.npu().ExternalEvent()
        self._awaited = False
        self._reusable = False

    @property
    def reusable(self) -> bool:
        """Whether it was given when its wait had been called, so that the flag is clear."""
        return self._reusable

    def wait(self, stream: Any) -> None:
        """Enqueue the wait."""
        self._reusable = False
        self._event.wait(stream)
        self._awaited = True

    def signal(self) -> None:
        """Write the 1, on a stream of its own."""
        self._reusable, self._awaited = self._awaited, False
        self._device.set_current()
        self._event.record(self._device.cached_stream(SIGNAL_STREAM))


class NpuReleaseFlag:
    """A word of page-locked memory that a stream copies a 1 into."""

    def __init__(self, device: Device) -> None:
        self._word = pinned(4).view(torch.int32).zero_()
        self._one = one_on_device(device)

    def set(self, stream: Any) -> None:
        """Enqueue the copy on the current stream."""
        copy(self._word, self._one)

    def is_set(self) -> bool:
        """Whether the copy came."""
        return int(self._word) == 1

    def clear(self) -> None:
        """Back to 0."""
        self._word.zero_()


class NpuLockFlags:
    """Makes them."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def acquire_flag(self) -> NpuAcquireFlag:
        """An external event."""
        return NpuAcquireFlag(self._device)

    def release_flag(self) -> NpuReleaseFlag:
        """A word of 0."""
        return NpuReleaseFlag(self._device)


_ones: dict[int, Tensor] = {}


def one_on_device(device: Device) -> Tensor:
    """The number 1 on that device, int32 [1], there when this returns."""
    if device.index not in _ones:
        stream = device.cached_stream(SIGNAL_STREAM)
        with device.runtime.current(stream):
            made = torch.ones(1, dtype=torch.int32, pin_memory=True).to(device.torch)
        stream.synchronize()
        _ones[device.index] = made
    return _ones[device.index]
