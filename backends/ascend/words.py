"""The two words of a stream lock, as the device knows them."""

from typing import Any

import torch
from torch import Tensor

from equipoise.backends.ascend import native
from equipoise.backends.ascend.memory import copy, pinned

USE = "signal"
"""The stream that signals are given on; nothing ever waits there, so a signal is never late."""


class FullWord:
    """A vendor's external event, for one waiting acquire at a time.

    The stream waits until the word is 1 and then writes 0; a signal writes 1. Waiting and writing 0
    are two steps, so that two streams that wait for one word may both go on: every acquire under
    way has a word to itself (clause L1). One that was captured keeps its word for all replays.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._event: Any = native.npu().ExternalEvent()

    def wait(self, stream: Any) -> None:
        """Enqueue the wait on a vendor's stream, which may be capturing."""
        self._event.wait(stream)

    def give(self) -> None:
        """Release the one that waits, or will. The word must have been taken since the last."""
        native.settle_thread(self._index)
        self._event.record(native.kept_stream(self._index, USE))


class EmptyWord:
    """A word of page-locked memory that a stream sets to 1, for the host to read."""

    def __init__(self, index: int) -> None:
        self._word = pinned(4).view(torch.int32).zero_()
        self._one = one_on(index)

    def set(self) -> None:
        """Enqueue the setting on the current stream, which may be capturing."""
        copy(self._word, self._one)

    def is_set(self) -> bool:
        """Whether a stream has come there."""
        return int(self._word) == 1

    def clear(self) -> None:
        """Back to 0."""
        self._word.zero_()


_ones: dict[int, Tensor] = {}


def one_on(index: int) -> Tensor:
    """The number 1 on that device, int32 [1], there when this returns."""
    if index not in _ones:
        stream = native.kept_stream(index, USE)
        with native.current(stream):
            made = torch.ones(1, dtype=torch.int32, pin_memory=True).to(torch.device("npu", index))
        stream.synchronize()
        _ones[index] = made
    return _ones[index]
