"""Captures a stream's launches from one thread: vendor graphs, with host calls between them."""

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from equipoise.backends.devices.event import DeviceEvent
from equipoise.backends.devices.issue_lock import DeviceStreamOp
from equipoise.backends.devices.runtime import Device
from equipoise.hal.errors import Unsupported
from equipoise.hal.stream import Stream

CAPTURE_STREAM = "capture"
"""Use of the cached stream on which everything is captured. A stream of its own, so that what other
threads launch during the capture is not captured with it; a graph can be replayed on any stream."""
CAPTURE_TIMEOUT = 60.0
"""Seconds to wait for another thread's capture: the vendors allow one at a time. A capture compiles
kernels the first time, which takes seconds; a minute means that it hangs."""


@dataclass(frozen=True)
class GraphSegment:
    """A vendor graph, the operations in it, and the programs whose memory it points to."""

    graph: Any
    ops: tuple[DeviceStreamOp, ...]
    keep_alive: tuple[object, ...]

    def issue(self, on: Stream) -> None:
        """Replay it, with what the host does around each operation."""
        with ExitStack() as scopes:
            for op in self.ops:
                scopes.enter_context(op.scope(on))
            on.launch(self.graph.replay)


@dataclass(frozen=True)
class HostCall:
    """A recording of an event, or a wait for one: a replay makes it anew, since the point that it
    refers to is another at each replay."""

    issue: Callable[[Stream], None]
    ops: tuple[DeviceStreamOp, ...] = ()


GraphPart = GraphSegment | HostCall


@dataclass(eq=False)
class _OpenSegment:
    """A segment that is being captured."""

    graph: Any
    ops: list[DeviceStreamOp] = field(default_factory=list)
    kept_alive: list[object] = field(default_factory=list)


class Capture:
    """A capture in progress, on one thread.

    Attributes:
        recorded: events that are recorded within it.
    """

    def __init__(self, device: Device) -> None:
        self._runtime = device.runtime
        self._stream = device.cached_stream(CAPTURE_STREAM)
        self._parts: list[GraphPart] = []
        self._open: _OpenSegment | None = None
        self.recorded: set[DeviceEvent] = set()

    @property
    def stream(self) -> Any:
        """The vendor's stream that is captured."""
        return self._stream

    def run(self, program: Callable[[], object]) -> None:
        """Capture what `program` enqueues. The program is kept alive, because the graph points into
        memory that it refers to."""
        segment = self._open_segment()
        segment.kept_alive.append(program)
        with self._runtime.current(self._stream):
            program()

    def capture_ops(self, ops: Sequence[DeviceStreamOp]) -> None:
        """Capture the work of operations."""
        for op in ops:
            segment = self._open_segment()
            segment.ops.append(op)
            with self._runtime.current(self._stream):
                op.enqueue(self._stream)

    def keep_alive(self, what: object) -> None:
        """Keep `what` with the open segment, whose work points into it."""
        self._open_segment().kept_alive.append(what)

    @property
    def segment(self) -> object:
        """An object that identifies the open segment; it is hashed by identity."""
        return self._open_segment()

    def add_host_call(self, issue: Callable[[Stream], None]) -> None:
        """End the segment, and let the host call `issue` at this place of a replay."""
        self._end()
        self._parts.append(HostCall(issue))

    def finish(self) -> tuple[GraphPart, ...]:
        """End the capture and return its parts."""
        self._end()
        return tuple(self._parts)

    def abandon(self) -> None:
        """Leave the vendor's capture, whatever state it is in. The vendor raises if the capture is
        already invalid, which is why this is called."""
        with suppress(RuntimeError):
            self._end()

    def _open_segment(self) -> _OpenSegment:
        if self._open is None:
            with self._runtime.current(self._stream):
                self._open = _OpenSegment(self._runtime.begin_capture())
        return self._open

    def _end(self) -> None:
        segment, self._open = self._open, None
        if segment is None:
            return
        with self._runtime.current(self._stream):
            self._runtime.end_capture(segment.graph)
        self._parts.append(
            GraphSegment(segment.graph, tuple(segment.ops), tuple(segment.kept_alive))
        )


_turn = threading.Lock()
_here = threading.local()
"""`_here.captures`: whether this thread captures. A nested capture would wait for itself."""


@contextmanager
def try_capture_lock() -> Iterator[bool]:
    """Yields whether no thread captures; if so, none can start until the end of the block."""
    has_lock = _turn.acquire(blocking=False)
    try:
        yield has_lock
    finally:
        if has_lock:
            _turn.release()


@contextmanager
def capturing(device: Device) -> Iterator[Capture]:
    """Capture on this thread. Raises `Unsupported` if another thread's capture does not end in
    time, or if this thread already captures another stream."""
    if getattr(_here, "captures", False):
        raise Unsupported("this thread captures another stream already")
    if not _turn.acquire(timeout=CAPTURE_TIMEOUT):
        raise Unsupported(f"another thread has been capturing for more than {CAPTURE_TIMEOUT:g} s")
    # The garbage collector must not run on this thread: a finaliser may free device memory or an
    # event, and the vendor invalidates a capture whose thread does that.
    collects = gc.isenabled()
    gc.disable()
    _here.captures = True
    try:
        yield Capture(device)
    finally:
        _here.captures = False
        if collects:
            gc.enable()
        _turn.release()
