"""Streams, events and graphs: torch's generic ones, behind the protocols of `hal`.

Order, waits, queries, synchronisation and capture are torch's own calls. Added is what has no
counterpart in torch: that a program is a launch, that one which raises fails its stream, that a
closed stream refuses work, and that a wait has a timeout.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from equipoise.backends.common.bounded_wait import poll
from equipoise.hal.errors import StreamFailed, StreamTimeout
from equipoise.hal.stream import Event, Role, Stream
from equipoise.hal.support.native_call_guard import NATIVE_CALL_GUARD

CAPTURE_MODE: Final = "thread_local"
"""What a capture forbids, in torch's words: other threads go on querying events meanwhile."""


class TorchEvent:
    """One `torch.Event`, which is recorded and waited for as often as the caller says.

    An event that was never recorded is whatever torch makes of it (clause O3).

    Args:
        device: of the streams that record it.
    """

    def __init__(self, device: torch.device) -> None:
        self.native = torch.Event(device=device)
        self.failure: BaseException | None = None
        """Why its stream had failed when it was recorded last."""

    def query(self) -> bool:
        """As torch says; true for a point that a failed stream will not reach."""
        return self.failure is not None or bool(self.native.query())

    def synchronize(self, timeout: float) -> None:
        """By `torch.Event.synchronize`, unless a query says that the point is reached."""
        if not (self.query() or _returns(self.native.synchronize, timeout)):
            raise StreamTimeout(f"the event was not reached within {timeout:g} s")
        if self.failure is not None:
            raise StreamFailed(f"the recording stream failed: {self.failure}") from self.failure


class TorchStream:
    """One `torch.Stream`: a program runs on the calling thread while the stream is current.

    Args:
        role: what the stream is for.
        native: torch's own.
        issue_lock: held while something is issued to any stream of the accelerator.
        adopted: whether an engine owns torch's stream.
    """

    def __init__(
        self, role: Role, native: torch.Stream, issue_lock: threading.RLock, adopted: bool = False
    ) -> None:
        self._role = role
        self.native = native
        self.issue_lock = issue_lock
        self._adopted = adopted
        self._failure: BaseException | None = None
        self._closed = False
        self._in_program = False

    @property
    def role(self) -> Role:
        """What the stream is for."""
        return self._role

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it torch's current stream of the calling thread.

        By `set_stream`: a `torch.Stream` as a context manager cannot be entered twice.
        """
        index = self.native.device_index
        with torch.accelerator.device_index(index):
            before = torch.accelerator.current_stream(index)
            torch.accelerator.set_stream(self.native)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    def launch(self, program: Callable[[], object]) -> None:
        """Run `program`: what it enqueues is the launch. One inside another is a part of it."""
        with self.issue_lock:
            if self._in_program:
                program()
                return
            self.check()
            self._run(program)

    def record(self, event: Event) -> None:
        """By `torch.Event.record`."""
        own = own_event(event)
        with self.issue_lock:
            own.failure = self._cause()
            self.check()
            own.native.record(self.native)

    def wait(self, event: Event) -> None:
        """By `torch.Event.wait`."""
        own = own_event(event)
        with self.issue_lock:
            self.check()
            if own.failure is not None:
                self._failure = own.failure
                self.check()
            own.native.wait(self.native)

    def synchronize(self, timeout: float) -> None:
        """Poll `torch.Stream.query`: torch's own wait has no timeout."""
        if not poll(self.native.query, timeout):
            raise StreamTimeout(f"stream {self._role} was not drained within {timeout:g} s")
        self.check()

    def close(self, timeout: float) -> None:
        """Refuse further work, after waiting up to `timeout` seconds for what was launched."""
        self._closed = True
        poll(self.native.query, timeout)

    def check(self) -> None:
        """Raise `StreamFailed` if it has failed or was closed."""
        if self._failure is not None:
            raise StreamFailed(f"stream {self._role} failed: {self._failure}") from self._failure
        if self._closed:
            raise StreamFailed(f"stream {self._role} was closed")

    def _cause(self) -> BaseException | None:
        try:
            self.check()
        except StreamFailed as refusal:
            return refusal.__cause__ or refusal
        return None

    def _run(self, program: Callable[[], object]) -> None:
        self._in_program = True
        try:
            with self.current():
                program()
        except Exception as failure:
            if self._adopted:
                raise StreamFailed(f"a program on an adopted stream raised: {failure}") from failure
            self._failure = failure
        finally:
            self._in_program = False


class TorchGraph:
    """A `torch.accelerator.Graph`, made anew for each capture; empty before the first."""

    def __init__(self) -> None:
        self._captured: tuple[torch.accelerator.Graph, Callable[[], object]] | None = None

    def capture(self, stream: Stream, program: Callable[[], object]) -> None:
        """Capture the stream while `program` runs; the graph keeps the program, whose memory it
        points to."""
        own, graph = own_stream(stream), torch.accelerator.Graph(capture_error_mode=CAPTURE_MODE)
        with own.issue_lock, own.current(), graph:
            program()
        self._captured = graph, program

    def replay(self, stream: Stream) -> None:
        """Replay on the stream."""
        if self._captured is not None:
            own_stream(stream).launch(self._captured[0].replay)


def _returns(block: Callable[[], object], timeout: float) -> bool:
    """Whether one of torch's waits returns within `timeout` seconds.

    It has no timeout, so it runs on a thread of its own, which is left behind when the time is up
    and ends with the wait.
    """
    index = torch.accelerator.current_device_index()
    errors: list[BaseException] = []

    def wait() -> None:
        # A daemon must not be inside torch when the interpreter ends.
        with NATIVE_CALL_GUARD:
            try:
                torch.accelerator.set_device_index(index)
                block()
            except BaseException as error:
                errors.append(error)

    thread = threading.Thread(target=wait, name="equipoise.torch_wait", daemon=True)
    thread.start()
    thread.join(timeout)
    if errors:
        raise errors[0]
    return not thread.is_alive()


def own_event(event: Event) -> TorchEvent:
    """`event` itself. Raises `TypeError` for one of another backend."""
    if not isinstance(event, TorchEvent):
        raise TypeError(f"an event of another backend: {event!r}")
    return event


def own_stream(stream: Stream) -> TorchStream:
    """`stream` itself. Raises `TypeError` for one of another backend."""
    if not isinstance(stream, TorchStream):
        raise TypeError(f"a stream of another backend: {stream!r}")
    return stream
