"""The engine's streams: what is launched here comes behind what the engine launched before, and
ahead of what it launches next.

An engine computes on one stream, most of the time. It captures its forward on another, replays the
graph on the first, and some change theirs for good behind the first forward. So nothing here
relies on the stream that was current when the device was opened, *home*, where our boundaries are:

- routing is a part of the forward, and is launched on the stream that is current, whichever it is;
- all else is ours, and is launched at home, with an event before and behind it where the engine is
  elsewhere.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.stream import Role, Stream


class EngineStreams(Protocol):
    """Of one worker."""

    @property
    def compute_stream(self) -> Stream:
        """What is ours is launched here."""
        ...

    def ordered_section(self) -> AbstractContextManager[None]:
        """Around what is launched at home, outside of captures."""
        ...

    def launch_in_forward(self, program: Callable[[Stream], object]) -> None:
        """Launch a part of the engine's forward, and tell it on which stream."""
        ...


class HostEngineStreams:
    """The host has no stream that the engine could be on: programs run on a thread of ours, and are
    waited for.

    Args:
        compute_stream: the compute stream.
        deadline: seconds that a wait may last.
    """

    def __init__(self, compute_stream: Stream, deadline: float) -> None:
        self.compute_stream = compute_stream
        self._deadline = deadline

    @contextmanager
    def ordered_section(self) -> Iterator[None]:
        """Waits for what was launched within. Raises `StreamFailed`, `StreamTimeout`."""
        yield
        self.compute_stream.synchronize(self._deadline)

    def launch_in_forward(self, program: Callable[[Stream], object]) -> None:
        """Waited for. Raises `StreamFailed`, `StreamTimeout`."""
        self.compute_stream.launch(lambda: program(self.compute_stream))
        self.compute_stream.synchronize(self._deadline)


class DeviceEngineStreams:
    """The engine is on a stream of the device, and nobody waits on the host.

    Args:
        accelerator: the device; it adopts what the engine is on.
        current: the vendor's stream that is current on the calling thread.
    """

    def __init__(self, accelerator: Accelerator, current: Callable[[], object]) -> None:
        self._accelerator = accelerator
        self._current = current
        self.compute_stream = self._current_stream()

    @contextmanager
    def ordered_section(self) -> Iterator[None]:
        """Two events, where the engine is elsewhere. Raises `StreamFailed`."""
        current = self._current_stream()
        self._order(current, self.compute_stream)
        yield
        self._order(self.compute_stream, current)

    def launch_in_forward(self, program: Callable[[Stream], object]) -> None:
        """On the engine's own stream, and into a graph it captures. Raises `StreamFailed`."""
        current = self._current_stream()
        current.launch(lambda: program(current))

    def _current_stream(self) -> Stream:
        """What the calling thread is on; adopted at the first meeting."""
        return self._accelerator.adopt(self._current())

    def _order(self, first: Stream, then: Stream) -> None:
        if first is not then:
            event = self._accelerator.event()
            first.record(event)
            then.wait(event)


class EngineAccelerator:
    """An accelerator whose compute stream is the one that an engine is at home on.

    Args:
        inner: the device; all else is its own.
        compute_stream: adopted from the engine.
    """

    def __init__(self, inner: Accelerator, compute_stream: Stream) -> None:
        self._inner = inner
        self._compute_stream = compute_stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def stream(self, role: Role) -> Stream:
        """The engine's for computing, the device's own for everything beside it."""
        return self._compute_stream if role is Role.COMPUTE else self._inner.stream(role)
