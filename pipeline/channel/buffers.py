"""Memory that is used again and again, and whether anybody still has a tensor over it.

Waiting for whoever reads a buffer to let go of it.
"""

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.errors import BuffersBusy
from equipoise.pipeline.channel.edge import Edge
from equipoise.pipeline.channel.message import HEADER_BYTES, HEADER_WORDS


class TrackedBuffer:
    """One buffer of a ring, empty to begin with.

    Whoever hands out views of it cannot know how long they are kept, and by whom: a model may keep
    a tensor that the mapping it came from does not survive. So the memory itself is asked: its
    storage counts the tensors over it.

    Args:
        memory: makes uint8 [n] for n bytes.

    Attributes:
        memory: uint8 [n], the buffer.
    """

    def __init__(self, memory: Callable[[int], Tensor]) -> None:
        self._make = memory
        self._have(0)

    def reserve(self, nbytes: int) -> bool:
        """Have at least so many bytes; whether what was in a smaller buffer is lost for it."""
        if self.memory.numel() >= nbytes:
            return False
        self._have(nbytes)
        return True

    def add_owner_views(self, count: int) -> None:
        """The owner keeps so many views more of its own; fewer, where it is negative."""
        self._alone += count

    @property
    def in_use(self) -> bool:
        """Whether there is a tensor over the memory besides the buffer's and its owner's own."""
        return _tensors_over(self.memory) > self._alone

    def _have(self, nbytes: int) -> None:
        self.memory = self._make(nbytes)
        self._alone = _tensors_over(self.memory)


def host_headers(accelerator: Accelerator, headers: int = 1) -> Tensor:
    """int64 [headers, 8] of the host's memory, page-locked where that is declared."""
    return accelerator.pinned(HEADER_BYTES * headers).view(torch.int64).view(headers, HEADER_WORDS)


def _tensors_over(memory: Tensor) -> int:
    """References to a tensor's storage: one more for each view of it, in any thread."""
    storage = memory.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


POLL_SECONDS = 0.0005
"""Seconds between two looks whether the tensors over a buffer are gone: nobody tells when."""

POLLS_PER_STREAM_CHECK = 200
"""Looks from one question to the stream, whether it has failed, to the next: each has a place in
the stream's queue."""


class ReleaseWaiter:
    """Of an end's buffers.

    Args:
        edge: whose end it is.
    """

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._changed = threading.Event()
        self._alive = edge.accelerator.event()

    def notify(self) -> None:
        """Somebody may have let go."""
        self._changed.set()

    def wait(self, over: Callable[[], bool], holder: Callable[[], str]) -> None:
        """Block until `over`, for the edge's deadline at most.

        Raises:
            BuffersHeld: it is not over by then; `holder` says who is not through.
            StreamFailed: the edge's stream failed: what it ran keeps what it read.
        """
        if over():
            return
        began = time.monotonic_ns()
        expiry = time.monotonic() + self._edge.deadline
        looks = 0
        while not over():
            if time.monotonic() >= expiry:
                raise BuffersBusy(holder())
            if looks % POLLS_PER_STREAM_CHECK == 0:
                self._edge.stream.record(self._alive)  # raises where the stream has failed
            looks += 1
            self._changed.wait(POLL_SECONDS)
            self._changed.clear()
        self._edge.counters.add_reader_wait(time.monotonic_ns() - began)
