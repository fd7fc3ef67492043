"""Graphs, and what becomes of those that are dropped while the device still runs them."""

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
    """What a graph is made of, and the events behind the replays that may still run."""

    parts: tuple[GraphPart, ...] = ()
    replays: list[DeviceEvent] = field(default_factory=list)

    def idle(self) -> bool:
        """Whether no stream runs it any more."""
        self.replays = [event for event in self.replays if not event.query()]
        return not self.replays


_dropped: deque[_GraphBody] = deque()
"""Without a lock: a graph may be dropped by the garbage collector, in the middle of anything."""


def release_dropped() -> None:
    """Let go of the graphs that were dropped and that no stream runs any more."""
    for _ in range(len(_dropped)):
        try:
            body = _dropped.popleft()
        except IndexError:  # another thread sweeps too
            return
        if not body.idle():
            _dropped.append(body)


class DeviceGraph:
    """What was captured; empty at first, and after a capture that raised as it was before.

    A replay is one launch: another thread's commit comes before all of it or after all of it
    (clause V4). The vendor's graphs, and the memory that they point to, live until the last replay
    has passed. Raises `Unsupported` where the vendor cannot capture.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        if why := runtime.why_uncapturable():
            raise Unsupported(why)
        self._body = _GraphBody()
        weakref.finalize(self, _dropped.append, self._body).atexit = False

    def capture(self, stream: Stream, program: Callable[[], object]) -> None:
        """Keep what `program` launches on `stream` from this thread, without running it."""
        release_dropped()
        parts = own_stream(stream).capture(program)
        _dropped.append(_GraphBody(self._body.parts, self._body.replays))
        self._body.parts, self._body.replays = parts, []

    def replay(self, stream: Stream) -> None:
        """Launch what was kept, on this stream or another."""
        on, passed = own_stream(stream), DeviceEvent()
        self._body.idle()
        try:
            on.replay(self._body.parts)
        finally:
            self._body.replays.append(passed)
            on.record(passed)
