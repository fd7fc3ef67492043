"""Counters of one end of an edge."""

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class EdgeStatistics:
    """Counts since the end was opened; times in nanoseconds of the thread that waited.

    Attributes:
        messages: messages sent or received.
        nbytes: bytes of all messages, headers included.
        buffers: buffers allocated, for messages and for gathered slices.
        buffer_bytes: bytes of these.
        gathered: gathers of a tensor's slices.
        host_waits: times that the host waited for a message, a reader or a stream.
        waited_ns: time waited for a message to arrive, or to leave its buffer.
        held_ns: time waited for readers of a buffer.
    """

    messages: int = 0
    nbytes: int = 0
    buffers: int = 0
    buffer_bytes: int = 0
    gathered: int = 0
    host_waits: int = 0
    waited_ns: int = 0
    held_ns: int = 0

    def since(self, before: "EdgeStatistics") -> "EdgeStatistics":
        """Return the difference of these counts to earlier ones."""
        counts, earlier_counts = vars(self), vars(before)
        return EdgeStatistics(**{name: counts[name] - earlier_counts[name] for name in counts})


class EdgeCounters:
    """The counters of one end; any thread may add.

    Adding happens several times per step, so the counts are plain integers under one lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(vars(EdgeStatistics()), 0)

    def snapshot(self) -> EdgeStatistics:
        """Return the counts as they are now."""
        with self._lock:
            return EdgeStatistics(**self._counts)

    def add_message(self, nbytes: int) -> None:
        """Count a message."""
        with self._lock:
            self._counts["messages"] += 1
            self._counts["nbytes"] += nbytes

    def add_buffer(self, nbytes: int) -> None:
        """Count an allocated buffer."""
        with self._lock:
            self._counts["buffers"] += 1
            self._counts["buffer_bytes"] += nbytes

    def add_gather(self) -> None:
        """Count a gather."""
        self._add("gathered", 1)

    def add_host_wait(self) -> None:
        """Count a wait of the host."""
        self._add("host_waits", 1)

    def add_message_wait(self, nanoseconds: int) -> None:
        """Add time waited for a message."""
        self._add("waited_ns", nanoseconds)

    def add_reader_wait(self, nanoseconds: int) -> None:
        """Add time waited for a reader."""
        self._add("held_ns", nanoseconds)

    def _add(self, name: str, count: int) -> None:
        with self._lock:
            self._counts[name] += count
