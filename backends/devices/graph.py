"""Graphs of device work, which stay alive until the device has run their last replay."""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from equipoise.backends.devices.capture import GraphPart
from equipoise.backends.devices.event import DeviceEvent
from equipoise.backends.devices.runtime import DeviceRuntime
from equipoise.backends.devices.stream import own_stream
from equipoise.hal.errors import Unsupported
from equipoise.hal.stream import Stream


@dataclass
class _GraphBody:
    """The parts of a graph, and an event after each replay that may still run."""

    parts: tuple[GraphPart, ...] = ()
    replays: list[DeviceEvent] = field(default_factory=list)

    def idle(self) -> bool:
        """Whether no stream runs the graph any more."""
        self.replays = [event for event in self.replays if not event.query()]
        return not self.replays


_dropped_bodies: deque[_GraphBody] = deque()
"""Bodies of dropped graphs that a stream may still run. A deque and no lock: the garbage collector
may drop a graph at any point, also on a thread that holds the lock; appends and pops are atomic."""


def release_dropped() -> None:
    """Free the dropped graphs that no stream runs any more."""
    for _ in range(len(_dropped_bodies)):
        try:
            body = _dropped_bodies.popleft()
        except IndexError:  # another thread is doing the same
            return
        if not body.idle():
            _dropped_bodies.append(body)


class DeviceGraph:
    """Captured work; empty at first. A capture that raises leaves the graph as it was.

    A replay is one launch: another thread's commit comes before all of it or after all of it
    (clause V4). The vendor's graphs, and the memory that they point to, live until the last replay
    has passed on the device. Raises `Unsupported` where the vendor cannot capture.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        if why := runtime.why_uncapturable():
            raise Unsupported(why)
        self._body = _GraphBody()
        # Not at exit: the driver may be gone by then, and the process frees everything anyway.
        weakref.finalize(self, _dropped_bodies.append, self._body).atexit = False

    def capture(self, stream: Stream, program: Callable[[], object]) -> None:
        """Capture what `program` launches on `stream` from this thread; nothing of it runs."""
        release_dropped()
        parts = own_stream(stream).capture(program)
        # The old parts may still run: they are freed like those of a dropped graph.
        _dropped_bodies.append(_GraphBody(self._body.parts, self._body.replays))
        self._body.parts, self._body.replays = parts, []

    def replay(self, stream: Stream) -> None:
        """Launch the captured work, on this stream or another."""
        on, end_event = own_stream(stream), DeviceEvent()
        self._body.idle()
        try:
            on.replay(self._body.parts)
        finally:
            # Also when the replay raised: a part of it may have been launched, and uses the memory.
            self._body.replays.append(end_event)
            on.record(end_event)
