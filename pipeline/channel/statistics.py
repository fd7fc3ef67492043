"""What an end of an edge has done, in integers."""

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class EdgeStatistics:
    """Counts since the end was opened; times in nanoseconds of the thread that waited.

    Attributes:
        messages: begun, one a step where nothing below is counted besides.
        continued: messages that took a second part, because their first was announced too small.
        nbytes: of all messages, headers included.
        described: messages that carried a description of their class.
        classes: shape classes met.
        buffers: made, for messages and for what is gathered from slices.
        buffer_bytes: of these.
        gathered: gathers of a tensor's slices.
        waited_ns: for a message to arrive, or for one to be gone so that its buffer is free.
        held_ns: for whoever still read a buffer.
    """

    messages: int = 0
    continued: int = 0
    nbytes: int = 0
    described: int = 0
    classes: int = 0
    buffers: int = 0
    buffer_bytes: int = 0
    gathered: int = 0
    waited_ns: int = 0
    held_ns: int = 0

    def since(self, before: "EdgeStatistics") -> "EdgeStatistics":
        """What was counted behind `before`."""
        mine, theirs = vars(self), vars(before)
        return EdgeStatistics(**{name: mine[name] - theirs[name] for name in mine})


class EdgeCounters:
    """Counts for one end; any thread. Several times a step, so it is plain numbers under a lock."""

    def __init__(self) -> None:
        self._counting = threading.Lock()
        self._counts = dict.fromkeys(vars(EdgeStatistics()), 0)

    def snapshot(self) -> EdgeStatistics:
        """The counts by now."""
        with self._counting:
            return EdgeStatistics(**self._counts)

    def add_message(self, nbytes: int, described: int = 0, parts: int = 1) -> None:
        """One more message, with so many bytes of description."""
        with self._counting:
            self._counts["messages"] += 1
            self._counts["nbytes"] += nbytes
            self._counts["continued"] += parts - 1
            self._counts["described"] += int(described > 0)

    def add_buffer(self, nbytes: int) -> None:
        """One more buffer."""
        with self._counting:
            self._counts["buffers"] += 1
            self._counts["buffer_bytes"] += nbytes

    def add_schema(self) -> None:
        """One more shape class."""
        self._add("classes", 1)

    def add_gather(self) -> None:
        """One more gather."""
        self._add("gathered", 1)

    def add_message_wait(self, nanoseconds: int) -> None:
        """Somebody waited for a message."""
        self._add("waited_ns", nanoseconds)

    def add_reader_wait(self, nanoseconds: int) -> None:
        """Somebody waited for a reader."""
        self._add("held_ns", nanoseconds)

    def _add(self, name: str, count: int) -> None:
        with self._counting:
            self._counts[name] += count
