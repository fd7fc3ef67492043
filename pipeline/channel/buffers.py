"""Buffers that are reused, and waiting until no tensor refers to their memory."""

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
    """One buffer of a ring, empty at first, that knows whether tensors refer to it.

    The channel hands out views and cannot know how long they live: a model may keep a tensor longer
    than the mapping that it came from. So the reference count of the storage decides whether the
    buffer may be reused.

    Args:
        allocate: returns uint8 [n] for n bytes.

    Attributes:
        memory: uint8 [n], the buffer.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._replace(0)

    def reserve(self, nbytes: int) -> bool:
        """Grow the buffer to `nbytes` if it is smaller. Returns whether it was replaced, and its
        content lost."""
        if self.memory.numel() >= nbytes:
            return False
        self._replace(nbytes)
        return True

    def add_owner_views(self, count: int) -> None:
        """Declare `count` more views that the owner keeps, or fewer if negative."""
        self._own_references += count

    @property
    def in_use(self) -> bool:
        """Whether a tensor refers to the memory that is neither the buffer's nor its owner's."""
        return _tensors_over(self.memory) > self._own_references

    def _replace(self, nbytes: int) -> None:
        self.memory = self._allocate(nbytes)
        self._own_references = _tensors_over(self.memory)


def host_headers(accelerator: Accelerator, headers: int = 1) -> Tensor:
    """Allocate int64 [headers, 8] in host memory, page-locked if the accelerator supports that."""
    return accelerator.pinned(HEADER_BYTES * headers).view(torch.int64).view(headers, HEADER_WORDS)


def _tensors_over(memory: Tensor) -> int:
    """References to the storage of `memory`: one for each view of it, in any thread."""
    storage = memory.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


POLL_SECONDS = 0.0005
"""Seconds between two checks of a reference count: dropping a tensor notifies nobody, so it has to
be polled."""

POLLS_PER_STREAM_CHECK = 200
"""Polls per check whether the stream has failed (100 ms): each check records an event, which takes
a place in the stream's queue."""


class ReleaseWaiter:
    """Waits until the readers of an end's buffers have released them.

    Args:
        edge: of the end.
    """

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._changed = threading.Event()
        self._alive = edge.accelerator.event()

    def notify(self) -> None:
        """Wake up a waiter: a reader may have released a buffer."""
        self._changed.set()

    def wait(self, is_free: Callable[[], bool], holder: Callable[[], str]) -> None:
        """Block until `is_free()`, for the edge's deadline at most.

        Raises:
            BuffersBusy: the deadline passed; `holder()` is the message.
            StreamFailed: the edge's stream failed: its programs keep what they read.
        """
        if is_free():
            return
        self._edge.counters.add_host_wait()
        began = time.monotonic_ns()
        expiry = time.monotonic() + self._edge.deadline
        polls = 0
        while not is_free():
            if time.monotonic() >= expiry:
                raise BuffersBusy(holder())
            if polls % POLLS_PER_STREAM_CHECK == 0:
                self._edge.stream.record(self._alive)  # raises where the stream has failed
            polls += 1
            self._changed.wait(POLL_SECONDS)
            # A release between the wait and this is not missed: `is_free` is asked next.
            self._changed.clear()
        self._edge.counters.add_reader_wait(time.monotonic_ns() - began)
