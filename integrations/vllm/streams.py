"""Ordering of our work with the engine's streams.

Our work has to run after what the engine launched before, and before what it launches next. An
engine computes on one stream most of the time; but it captures its forward pass on another, and
some engines change their stream after the first forward pass. So nothing relies on the *compute
stream*, which was current when the device was opened, being current later:

- routing is part of the forward pass, and is launched on whichever stream is current;
- all other work is launched on the compute stream. If the engine is on another stream, events
  before and after it order the two.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.stream import Role, Stream


class EngineStreams(Protocol):
    """The streams of one worker."""

    @property
    def compute_stream(self) -> Stream:
        """The stream that our work is launched on."""
        ...

    def ordered_section(self) -> AbstractContextManager[None]:
        """Return a context for launching our work on the compute stream, outside of captures."""
        ...

    def launch_in_forward(self, program: Callable[[Stream], object]) -> None:
        """Launch a part of the forward pass; the program gets the stream it runs on."""
        ...


class HostEngineStreams:
    """Streams on a CPU, where the engine has none: programs run on our thread, and are waited for.

    Args:
        compute_stream: runs the programs.
        deadline: seconds that a wait may last.
    """

    def __init__(self, compute_stream: Stream, deadline: float) -> None:
        self.compute_stream = compute_stream
        self._deadline = deadline

    @contextmanager
    def ordered_section(self) -> Iterator[None]:
        """Wait for what was launched in the context. Raises `StreamFailed`, `StreamTimeout`."""
        yield
        self.compute_stream.synchronize(self._deadline)

    def launch_in_forward(self, program: Callable[[Stream], object]) -> None:
        """Launch the program and wait for it. Raises `StreamFailed`, `StreamTimeout`."""
        self.compute_stream.launch(lambda: program(self.compute_stream))
        self.compute_stream.synchronize(self._deadline)


class DeviceEngineStreams:
    """Streams on a device; the host does not wait.

    Args:
        accelerator: the device; adopts the engine's streams.
        current: returns the vendor's stream that is current on the calling thread.
    """

    def __init__(self, accelerator: Accelerator, current: Callable[[], object]) -> None:
        self._accelerator = accelerator
        self._current = current
        self.compute_stream = self._current_stream()

    @contextmanager
    def ordered_section(self) -> Iterator[None]:
        """Order both ways by events if the engine is on another stream. Raises `StreamFailed`."""
        current = self._current_stream()
        self._order(current, self.compute_stream)
        yield
        self._order(self.compute_stream, current)

    def launch_in_forward(self, program: Callable[[Stream], object]) -> None:
        """Launch on the current stream, and so into a graph being captured. Raises
        `StreamFailed`."""
        current = self._current_stream()
        current.launch(lambda: program(current))

    def _current_stream(self) -> Stream:
        """Return the current stream of the calling thread; adopted at its first use."""
        return self._accelerator.adopt(self._current())

    def _order(self, before: Stream, after: Stream) -> None:
        if before is not after:
            event = self._accelerator.event()
            before.record(event)
            after.wait(event)


class EngineAccelerator:
    """An accelerator whose compute stream is the engine's.

    Args:
        inner: the device; everything else is delegated to it.
        compute_stream: adopted from the engine.
    """

    def __init__(self, inner: Accelerator, compute_stream: Stream) -> None:
        self._inner = inner
        self._compute_stream = compute_stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def stream(self, role: Role) -> Stream:
        """Return the engine's stream for `COMPUTE`, and the device's own for other roles."""
        return self._compute_stream if role is Role.COMPUTE else self._inner.stream(role)
