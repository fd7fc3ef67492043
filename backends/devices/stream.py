"""Streams of a device: launches in order, errors that are kept, and capture."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from equipoise.backends.common.bounded_wait import poll
from equipoise.backends.devices.capture import Capture, GraphPart, capturing
from equipoise.backends.devices.event import DeviceRecording, own_event
from equipoise.backends.devices.issue_lock import DeviceStreamOp, IssueLock
from equipoise.backends.devices.runtime import Device
from equipoise.hal.errors import StreamFailed, StreamTimeout, Unsupported
from equipoise.hal.stream import Event, Role, Stream


class _DeviceThreadState(threading.local):
    """What one thread is doing on a stream."""

    capture: Capture | None = None
    """The capture that its launches go to instead of the device."""
    in_program: bool = False
    """Whether it runs one of the stream's programs."""


class DeviceStream:
    """A stream of the vendor's on which everything is launched under the issue lock.

    A program runs on the calling thread with the stream current, and what it enqueues is the
    launch. A program that raises fails this object for good, and so does a device error: later
    launches, recordings and waits raise the first cause. The vendor's stream is not affected.

    An adopted stream belongs to its engine, which goes on after an exception in a hook: there the
    launch itself raises, and later launches are accepted (clause E7).

    Args:
        role: what the stream is for.
        name: for messages.
        device: whose it is.
        native_stream: the vendor's own.
        issue_lock: shared by all streams of the accelerator.
        adopted: whether an engine owns the vendor's stream.
    """

    def __init__(
        self,
        role: Role,
        name: str,
        device: Device,
        native_stream: Any,
        issue_lock: IssueLock,
        adopted: bool = False,
    ) -> None:
        self._role = role
        self._name = name
        self._device = device
        self._runtime = device.runtime
        self._native = native_stream
        self._issue_lock = issue_lock
        self._adopted = adopted
        self._failure: BaseException | None = None
        self._closed = False
        self._thread_state = _DeviceThreadState()

    @property
    def role(self) -> Role:
        """What the stream is for."""
        return self._role

    @property
    def device(self) -> Device:
        """Whose it is."""
        return self._device

    @property
    def native_stream(self) -> Any:
        """The vendor's stream that work goes to: another one while this thread captures."""
        capture = self._thread_state.capture
        return self._native if capture is None else capture.stream

    def wraps(self, native_stream: Any) -> bool:
        """Whether it wraps that stream of the vendor's."""
        return bool(self._native == native_stream)

    @property
    def issue_lock(self) -> IssueLock:
        """Held while something is issued to any stream of the accelerator."""
        return self._issue_lock

    @property
    def capturing(self) -> bool:
        """Whether the calling thread captures it."""
        return self._thread_state.capture is not None

    @property
    def launch_target(self) -> object:
        """What this thread's launches go to: the stream, or the segment that is being captured, two
        of which may run side by side, in replays on two streams."""
        capture = self._thread_state.capture
        return self if capture is None else capture.segment

    def keep_alive(self, what: object) -> None:
        """Let the graph that is being captured keep `what`, as it keeps the program itself. Does
        nothing outside a capture."""
        if self._thread_state.capture is not None:
            self._thread_state.capture.keep_alive(what)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it the vendor's current stream: collectives come after what was launched here."""
        with self._runtime.current(self.native_stream):
            yield

    def launch(self, program: Callable[[], object]) -> None:
        """Run `program` with this stream current; one inside another runs as a part of it."""
        if self._thread_state.capture is not None:
            self._thread_state.capture.run(program)
            return
        with self._issue_lock:
            if self._thread_state.in_program:
                program()
                return
            self._check()
            self._run(program)

    def record(self, event: Event) -> None:
        """Move `event` to after everything launched so far."""
        own, capture = own_event(event), self._thread_state.capture
        if capture is not None:
            capture.recorded.add(own)
            capture.add_host_call(lambda stream: stream.record(own))
            return
        with self._issue_lock:
            self._record(own.start_recording(self._device))

    def wait(self, event: Event) -> None:
        """Make everything launched from now on wait for the latest recording of `event`."""
        own, capture = own_event(event), self._thread_state.capture
        if capture is not None:
            if own not in capture.recorded:
                own.latest()  # raises now what would come too late at the replay (clause O3)
            capture.add_host_call(lambda stream: stream.wait(own))
            return
        recording = own.latest()
        with self._issue_lock:
            self._check()
            if recording.failure is not None:
                self.fail(recording.failure)
                self._check()
            self._call(lambda: recording.block_stream(self._native))

    def synchronize(self, timeout: float) -> None:
        """Block until the device has run everything launched so far.

        Polled, since the vendor's own wait has no time-out. A failed stream is waited for too,
        before its failure is raised: what was launched before the failure runs, and uses memory.
        """
        if self._thread_state.capture is not None:
            raise Unsupported(f"stream {self._name} cannot be synchronised while it is captured")
        recording = DeviceRecording(self._device)
        with self._issue_lock:
            try:
                recording.record(self._native)
            except RuntimeError as failure:
                recording.fail(failure)
        if not poll(recording.is_complete, timeout):
            raise StreamTimeout(f"the end of {self._name} was not reached within {timeout:g} s")
        if recording.failure is not None:
            self.fail(recording.failure)
        self._ask_for_errors()
        self._check()

    def issue(self, *ops: DeviceStreamOp) -> None:
        """Issue operations back to back, or capture them.

        Raises `Unsupported` if an engine captures the vendor's stream: its replays would repeat the
        work without the host's part of it.
        """
        if self._thread_state.capture is not None:
            self._thread_state.capture.capture_ops(ops)
            return
        if self._runtime.is_captured(self._native):
            raise Unsupported("an engine captures this stream: its replays would not be known here")
        with self._issue_lock, ExitStack() as guards:
            # All guards before any work: a batch is refused as a whole or not at all.
            for op in ops:
                guards.enter_context(op.guard())
            for op in ops:
                with op.scope(self):
                    self.launch(lambda op=op: op.enqueue(self._native))  # type: ignore[misc]

    def capture(self, program: Callable[[], object]) -> tuple[GraphPart, ...]:
        """Capture what `program` issues here from the calling thread; nothing of it runs."""
        if self._thread_state.capture is not None:
            raise Unsupported(f"stream {self._name} is being captured already")
        with capturing(self._device) as capture:
            self._thread_state.capture = capture
            try:
                program()
                return capture.finish()
            except BaseException:
                capture.abandon()
                raise
            finally:
                self._thread_state.capture = None

    def replay(self, parts: Sequence[GraphPart]) -> None:
        """Issue what was captured. Other threads see it as one launch, for the issue lock is
        held."""
        if self._thread_state.capture is not None:
            raise Unsupported("a graph cannot be captured into another")
        with self._issue_lock, ExitStack() as guards:
            for part in parts:
                for op in part.ops:
                    guards.enter_context(op.guard())
            for part in parts:
                part.issue(self)

    def fail(self, failure: BaseException) -> None:
        """Fail the stream; the first cause stays. From any thread.

        Without the issue lock: the watchdog fails streams while a launch may block with the lock.
        """
        if self._failure is None:
            self._failure = failure

    def close(self, timeout: float) -> None:
        """Refuse further work, after waiting up to `timeout` seconds for what was launched."""
        try:
            if not self._closed:
                self.synchronize(timeout)
        except (StreamFailed, StreamTimeout):
            pass  # closing must end, whatever became of the work
        finally:
            with self._issue_lock:
                self._closed = True

    def _run(self, program: Callable[[], object]) -> None:
        """Run the program of a launch. Its exception is raised by the next call, or at once if the
        stream was adopted (E7)."""
        self._thread_state.in_program = True
        try:
            with self._runtime.current(self._native):
                program()
        except BaseException as failure:
            if self._adopted and isinstance(failure, Exception):
                raise StreamFailed(f"a program on {self._name} raised: {failure}") from failure
            self.fail(failure)
            if not isinstance(failure, Exception):
                raise
        finally:
            self._thread_state.in_program = False

    def _record(self, recording: DeviceRecording) -> None:
        try:
            self._check()
            self._call(lambda: recording.record(self._native))
        except StreamFailed as refusal:
            # Else a stream that waits for the event would wait for ever.
            recording.fail(refusal.__cause__ or refusal)
            raise

    def _call(self, call: Callable[[], object]) -> None:
        """Call the vendor, which may report an error of earlier work on the device."""
        try:
            call()
        except RuntimeError as failure:
            self.fail(failure)
            self._check()

    def _ask_for_errors(self) -> None:
        """Ask for a device error, which the vendor reports only when the stream is synchronised.
        The stream is idle then, so that this does not block."""

        def ask() -> None:
            with self._device.runtime.allowed_in_capture():
                if self._native.query():
                    self._native.synchronize()

        with self._issue_lock:
            self._check_health()
            self._call(ask)

    def _check(self) -> None:
        self._check_health()
        if self._closed:
            raise StreamFailed(f"stream {self._name} was closed")

    def _check_health(self) -> None:
        if self._failure is not None:
            raise StreamFailed(f"stream {self._name} failed: {self._failure}") from self._failure


def own_stream(stream: Stream) -> DeviceStream:
    """`stream` itself. Raises `TypeError` for one of another backend."""
    if not isinstance(stream, DeviceStream):
        raise TypeError(f"a stream of another backend: {stream!r}")
    return stream
