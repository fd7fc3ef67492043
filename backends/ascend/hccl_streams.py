"""The pool of streams that HCCL's communicators run on, and which communicator has which stream.

Torch_npu takes a stream for each HCCL communicator from a pool of 32, in turn, and starts again at
the first: the 33rd communicator shares the stream of the first, and queues after whatever hangs
there. Streams are never given back either. So this process keeps account: before a communicator is
made, it draws streams until the one that comes next is free.

The pool is the high-priority one, which nothing else uses here: the accelerator's streams come from
the other one.
"""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from equipoise.hal.errors import CommunicatorFailed

HIGH_PRIORITY_VARIABLE = "TORCH_HCCL_HIGH_PRIORITY"
RELEASE_STREAM = "the release stream"
"""The owner, in error messages, of the stream that only signals to other streams are launched
on."""


class PoolStream(Protocol):
    """A stream of the vendor's."""

    @property
    def stream_id(self) -> int:
        """The vendor's number for it."""
        ...


class HcclStreamPool:
    """The pool of one device. Thread-safe; communicators are made one at a time.

    Args:
        draw: takes the next stream from the vendor's pool.
    """

    def __init__(self, draw: Callable[[], PoolStream]) -> None:
        self._draw = draw
        self._lock = threading.Lock()
        self._ring = _learn(draw)
        self._last = len(self._ring) - 1
        self._holders: dict[int, str] = {self._ring[0].stream_id: RELEASE_STREAM}

    @property
    def release_stream(self) -> PoolStream:
        """A stream that never waits."""
        return self._ring[0]

    def reserve_next(self) -> PoolStream:
        """Make a free stream the next one that torch_npu takes. Raises `CommunicatorFailed` if none
        is free."""
        with self._lock:
            self._last = self._place(self._draw().stream_id)  # an engine may have drawn since
            free = self._free()
            while self._ring[(self._last + 1) % len(self._ring)] is not free:
                self._last = self._place(self._draw().stream_id)
            return free

    def assign(self, number: int, owner: str) -> PoolStream:
        """Record that torch_npu took stream `number` for `owner`. Raises `CommunicatorFailed` if
        another one has it."""
        with self._lock:
            place = self._place(number)
            self._last = place
            holder = self._holders.setdefault(number, owner)
            if holder != owner:
                raise CommunicatorFailed(f"HCCL runs {owner} on the stream of {holder}")
            return self._ring[place]

    def release(self, stream: PoolStream) -> None:
        """Mark the stream as free: nothing runs there any more."""
        with self._lock:
            self._holders.pop(stream.stream_id, None)

    def holders(self) -> tuple[str, ...]:
        """The owners of streams."""
        with self._lock:
            return tuple(self._holders.values())

    def _free(self) -> PoolStream:
        for step in range(1, 1 + len(self._ring)):
            stream = self._ring[(self._last + step) % len(self._ring)]
            if stream.stream_id not in self._holders:
                return stream
        raise CommunicatorFailed(
            f"no stream is left for HCCL: the pool has {len(self._ring)}, held by "
            f"{', '.join(sorted(set(self._holders.values())))}"
        )

    def _place(self, number: int) -> int:
        for place, stream in enumerate(self._ring):
            if stream.stream_id == number:
                return place
        raise CommunicatorFailed(f"HCCL runs on stream {number}, which is not of its pool")


def _learn(draw: Callable[[], PoolStream]) -> Sequence[PoolStream]:
    """All streams of the pool, in its order, by drawing until the first comes again. The last
    element is the stream drawn last."""
    ring = [draw()]
    while (stream := draw()).stream_id != ring[0].stream_id:
        ring.append(stream)
    return [*ring[1:], stream]


_pools: dict[int, HcclStreamPool] = {}
_making = threading.Lock()


def hccl_stream_pool(npu: Any, index: int) -> HcclStreamPool:
    """The pool of this process for device `index`; `npu` is `torch.npu`."""
    # One at a time: the order of the pool is learned by drawing, and another thread's draws
    # would be taken for part of it.
    with _making:
        if index not in _pools:
            _pools[index] = HcclStreamPool(lambda: npu.Stream(device=index, priority=-1))
        return _pools[index]


class HighPriorityStreams:
    """Makes torch_npu take streams of communicators from the high-priority pool, which is unused
    else.

    Torch_npu reads an environment variable when it makes a communicator, and ignores the option of
    the same name. The variable is restored after the last communicator in progress: one whose peer
    was lost may still be in progress when the next is made.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: str | None = None

    def __enter__(self) -> None:
        """Set the variable."""
        with self._lock:
            if not self._inside:
                self._before = os.environ.get(HIGH_PRIORITY_VARIABLE)
                os.environ[HIGH_PRIORITY_VARIABLE] = "1"
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        """Restore the variable after the last one."""
        with self._lock:
            self._inside -= 1
            if not self._inside:
                if self._before is None:
                    del os.environ[HIGH_PRIORITY_VARIABLE]
                else:
                    os.environ[HIGH_PRIORITY_VARIABLE] = self._before


HIGH_PRIORITY_STREAMS = HighPriorityStreams()
"""Of this process."""
