"""The two words of a stream lock on a GPU: page-locked host memory that streams wait for and write.

The device's front end does both (stream memory operations), so that a waiting stream occupies no
multiprocessor (clause L4), and a graph keeps them as nodes. The host gives a word by storing into
it: no call of the driver's stands between a mover and the stream that waits for it. TensorRT-LLM's
copies deadlocked on exactly such a call, behind a launch that held the driver's lock (tech blog 8).
"""

from typing import Any

from equipoise.backends.cuda.word import shelf
from equipoise.backends.devices.runtime import Device

NO, YES = 0, 1


class CudaFullWord:
    """Given by a store of the host; taken by the stream that waited."""

    def __init__(self, device: Device) -> None:
        self._word = shelf(device).take()

    def wait(self, stream: Any) -> None:
        """Enqueue the wait, and the taking."""
        self._word.enqueue_wait(stream, YES)
        self._word.enqueue_write(stream, NO)

    def give(self) -> None:
        """Store the 1, after what the mover wrote: a device's copies have ended, other threads'
        stores were handed over, and those of this thread come before a barrier in the store."""
        self._word.store(YES)

    @property
    def lendable(self) -> bool:
        """Always: nothing is kept of it but its value."""
        return True


class CudaEmptyWord:
    """Set by a stream's write; read by the host."""

    def __init__(self, device: Device) -> None:
        self._word = shelf(device).take()

    def set(self, stream: Any) -> None:
        """Enqueue the write."""
        self._word.enqueue_write(stream, YES)

    def is_set(self) -> bool:
        """Whether the stream came there."""
        return self._word.value == YES

    def clear(self) -> None:
        """Back to 0."""
        self._word.store(NO)


class CudaWords:
    """Makes them."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def full(self) -> CudaFullWord:
        """A word of 0."""
        return CudaFullWord(self._device)

    def empty(self) -> CudaEmptyWord:
        """A word of 0."""
        return CudaEmptyWord(self._device)
