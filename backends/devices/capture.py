"""What a thread captures of a stream: vendor graphs, and between them what only the host can do."""

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from equipoise.backends.devices.event import DeviceEvent
from equipoise.backends.devices.issuing import DeviceStreamOp
from equipoise.backends.devices.runtime import Device
from equipoise.hal.errors import Unsupported
from equipoise.hal.stream import Stream

CAPTURE_STREAM = "capture"
"""The stream that everything is captured on: a graph may be replayed on any other, and so nothing
that other threads launch meanwhile is captured with it."""
CAPTURE_TIMEOUT = 60.0
"""Seconds to wait for another thread's capture; the vendor allows one at a time."""


@dataclass(frozen=True)
class GraphSegment:
    """A vendor graph, the verbs in it, and the programs whose memory it points to."""

    graph: Any
    verbs: tuple[DeviceStreamOp, ...]
    keep_alive: tuple[object, ...]

    def issue(self, on: Stream) -> None:
        """Replay it, with what the host does around each verb."""
        with ExitStack() as scopes:
            for op in self.verbs:
                scopes.enter_context(op.scope(on))
            on.launch(self.graph.replay)


@dataclass(frozen=True)
class HostCall:
    """A recording or a wait: the points that it means are new at every replay."""

    issue: Callable[[Stream], None]
    verbs: tuple[DeviceStreamOp, ...] = ()


GraphPart = GraphSegment | HostCall


@dataclass(eq=False)
class _Open:
    """A segment in the making."""

    graph: Any
    verbs: list[DeviceStreamOp] = field(default_factory=list)
    kept: list[object] = field(default_factory=list)


class Capture:
    """In the making, in the hands of one thread.

    Attributes:
        recorded: events that are recorded within it.
    """

    def __init__(self, device: Device) -> None:
        self._runtime = device.runtime
        self._stream = device.cached_stream(CAPTURE_STREAM)
        self._parts: list[GraphPart] = []
        self._open: _Open | None = None
        self.recorded: set[DeviceEvent] = set()

    @property
    def stream(self) -> Any:
        """The vendor's stream that is captured."""
        return self._stream

    def run(self, program: Callable[[], object]) -> None:
        """Capture what `program` enqueues; it is kept, for the memory that it names."""
        segment = self._open_segment()
        segment.kept.append(program)
        with self._runtime.current(self._stream):
            program()

    def capture_ops(self, ops: Sequence[DeviceStreamOp]) -> None:
        """Capture the work of verbs."""
        for op in ops:
            segment = self._open_segment()
            segment.verbs.append(op)
            with self._runtime.current(self._stream):
                op.enqueue(self._stream)

    def keep_alive(self, what: object) -> None:
        """With the segment in the making: its work points into this."""
        self._open_segment().kept.append(what)

    @property
    def segment(self) -> object:
        """What stands for the segment in the making, and is hashed by identity."""
        return self._open_segment()

    def add_host_call(self, issue: Callable[[Stream], None]) -> None:
        """Note what the host does at this place of a replay."""
        self._end()
        self._parts.append(HostCall(issue))

    def finish(self) -> tuple[GraphPart, ...]:
        """All of it."""
        self._end()
        return tuple(self._parts)

    def abandon(self) -> None:
        """Leave the vendor's capture, whatever state it is in."""
        with suppress(RuntimeError):
            self._end()

    def _open_segment(self) -> _Open:
        if self._open is None:
            with self._runtime.current(self._stream):
                self._open = _Open(self._runtime.begin_capture())
        return self._open

    def _end(self) -> None:
        made, self._open = self._open, None
        if made is None:
            return
        with self._runtime.current(self._stream):
            self._runtime.end_capture(made.graph)
        self._parts.append(GraphSegment(made.graph, tuple(made.verbs), tuple(made.kept)))


_turn = threading.Lock()
_here = threading.local()
"""Whether this thread captures: a second capture within it would wait for itself."""


@contextmanager
def try_capture_lock() -> Iterator[bool]:
    """Whether nobody captures; if so, nobody else does until the end of the block."""
    mine = _turn.acquire(blocking=False)
    try:
        yield mine
    finally:
        if mine:
            _turn.release()


@contextmanager
def capturing(device: Device) -> Iterator[Capture]:
    """This thread's turn to capture. Raises `Unsupported` if another thread's does not end, or if
    this one captures already, another stream."""
    if getattr(_here, "captures", False):
        raise Unsupported("this thread captures another stream already")
    if not _turn.acquire(timeout=CAPTURE_TIMEOUT):
        raise Unsupported(f"another thread has been capturing for more than {CAPTURE_TIMEOUT:g} s")
    # A finaliser that the collector runs on this thread may free memory or an event of the device,
    # and the vendor ends a capture in which its thread does that.
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
