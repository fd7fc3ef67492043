"""Streams of the CPU backend: worker threads with queues, their events, and graphs.

A graph is a list of operations, which each replay issues again.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue

from equipoise.hal.errors import EventNotRecorded, StreamFailed, StreamTimeout, Unsupported
from equipoise.hal.stream import Event, Role, Stream
from equipoise.hal.support.native_call_guard import NATIVE_CALL_GUARD


class Latch:
    """A one-shot `threading.Event`, without `clear`.

    Several are made per step, and a `threading.Event` costs a condition, a lock and a list, and one
    more lock per wait; this is one lock.
    """

    __slots__ = ("_lock", "_open", "_token")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._open = False
        self._token = [True]

    def is_set(self) -> bool:
        """Whether the point was reached."""
        return self._open

    def set(self) -> None:
        """Set it; from any thread, any number of times."""
        try:
            self._token.pop()  # atomic, so that exactly one thread releases the lock
        except IndexError:
            return
        self._open = True
        self._lock.release()

    def wait(self, timeout: float) -> bool:
        """Block until it is set, for at most `timeout` seconds. Returns whether it is."""
        if self._open:
            return True
        if not self._lock.acquire(timeout=min(max(timeout, 0.0), threading.TIMEOUT_MAX)):
            return self._open
        self._lock.release()  # for the next thread that waits
        return True


@dataclass(eq=False)
class CpuRecording:
    """One recording of an event: reached, or failed together with its stream."""

    latch: Latch = field(default_factory=Latch)
    failure: BaseException | None = None

    def fail(self, failure: BaseException) -> None:
        """Mark the point as never reached, and release those that wait."""
        self.failure = failure
        self.latch.set()

    def wait(self, timeout: float, what: str) -> None:
        """Block until the point is reached. Raises `StreamTimeout`, `StreamFailed`."""
        if not self.latch.wait(timeout):
            raise StreamTimeout(f"{what} was not reached within {timeout:g} s")
        if self.failure is not None:
            raise StreamFailed(f"{what} failed: {self.failure}") from self.failure


class CpuEvent:
    """A reference to the latest recording; a waiter keeps the recording that it saw."""

    def __init__(self) -> None:
        self._recording: CpuRecording | None = None

    def query(self) -> bool:
        """Whether the latest recording has been reached."""
        recording = self._recording
        return recording is not None and recording.latch.is_set()

    def synchronize(self, timeout: float) -> None:
        """Block until the latest recording is reached."""
        self.latest().wait(timeout, "the event")

    def latest(self) -> CpuRecording:
        """The latest recording. Raises `EventNotRecorded`."""
        if self._recording is None:
            raise EventNotRecorded("nothing was ever recorded into this event")
        return self._recording

    def start_recording(self) -> CpuRecording:
        """Start a new recording; earlier waiters keep the old one."""
        self._recording = CpuRecording()
        return self._recording


def own_event(event: Event) -> CpuEvent:
    """`event` itself. Raises `TypeError` for one of another backend."""
    if not isinstance(event, CpuEvent):
        raise TypeError(f"an event of another backend: {event!r}")
    return event


EVENT_TIMEOUT = 600.0
"""Seconds that one stream waits for an event of another before it fails: only a bound, so that a
worker thread never waits for ever. Far above any deadline of the stream lock."""


@dataclass(slots=True)
class _StreamTask:
    """A program and, for recordings, the recording that fails if the program never runs."""

    run: Callable[[], object]
    recording: CpuRecording | None = None

    def skip(self, failure: BaseException) -> None:
        if self.recording is not None:
            self.recording.fail(failure)

    def run_in_place(self) -> None:
        try:
            self.run()
        except BaseException as failure:
            self.skip(failure)
            raise


@dataclass(frozen=True)
class CpuStreamOp:
    """An operation on a stream, in a form that a graph can issue again.

    Attributes:
        issue: enqueues it on the stream it is given.
        guard: entered before any operation of the batch is issued; raises if it is forbidden.
    """

    issue: Callable[["CpuStream"], None]
    guard: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class _Capture:
    """What a thread has captured so far, and the events that it records."""

    ops: list[CpuStreamOp] = field(default_factory=list)
    recorded: set[CpuEvent] = field(default_factory=set)


class _CpuThreadState(threading.local):
    """What one thread is doing on a stream."""

    capture: _Capture | None = None
    """The capture that its operations go to instead of the queue."""
    deferred_tasks: list[_StreamTask] | None = None
    """Tasks that the worker itself runs as soon as it has released the issue lock."""


class CpuStream:
    """A worker thread and its queue; the thread starts with the first launch.

    An exception in a program fails the stream for good: later programs are skipped, every
    recording fails with the same cause, and `launch` and `synchronize` raise it.

    Args:
        role: what the stream is for.
        name: of the accelerator.
        issue_lock: a re-entrant lock, held while something is enqueued; streams that share one
            can be held back together.
    """

    def __init__(
        self, role: Role, name: str, issue_lock: AbstractContextManager[bool] | None = None
    ) -> None:
        self._role = role
        self._name = f"{name}.{role}"
        self._queue: SimpleQueue[_StreamTask | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._worker: threading.Thread | None = None
        self._closed = False
        self._issue_lock = threading.RLock() if issue_lock is None else issue_lock
        self._thread_state = _CpuThreadState()

    @property
    def role(self) -> Role:
        """What the stream is for."""
        return self._role

    @contextmanager
    def current(self) -> Iterator[None]:
        """Does nothing: gloo's operations are not ordered by streams (clause X6)."""
        yield

    def launch(self, program: Callable[[], object]) -> None:
        """Enqueue `program`, or run it at once when called from one of this stream's programs."""
        capture = self._thread_state.capture
        if capture is not None:
            capture.ops.append(CpuStreamOp(lambda stream: stream.launch(program)))
            return
        self._submit(_StreamTask(program))

    def record(self, event: Event) -> None:
        """Enqueue the point that `event` now stands for."""
        own, capture = own_event(event), self._thread_state.capture
        if capture is not None:
            capture.recorded.add(own)
            capture.ops.append(CpuStreamOp(lambda stream: stream.record(own)))
            return
        recording = own.start_recording()
        try:
            self._submit(_StreamTask(recording.latch.set, recording))
        except StreamFailed as refusal:
            # Else a stream that waits for the event would wait for ever.
            recording.fail(refusal.__cause__ or refusal)
            raise

    def wait(self, event: Event) -> None:
        """Make the worker wait for the latest recording of `event`."""
        own, capture = own_event(event), self._thread_state.capture
        if capture is not None:
            if own not in capture.recorded:
                own.latest()  # raises now what would come too late at the replay (clause O3)
            capture.ops.append(CpuStreamOp(lambda stream: stream.wait(own)))
            return
        recording = own.latest()
        self._submit(
            _StreamTask(
                lambda: recording.wait(EVENT_TIMEOUT, f"an event that {self._name} waits for")
            )
        )

    def synchronize(self, timeout: float) -> None:
        """Block until the queue has drained up to here."""
        if self._thread_state.capture is not None:
            raise Unsupported(f"stream {self._name} cannot be synchronised while it is captured")
        if self._worker is None and not self._closed:
            return  # nothing was ever launched
        end_event = CpuEvent()
        self.record(end_event)
        end_event.latest().wait(timeout, f"the end of stream {self._name}")

    def issue(self, *ops: CpuStreamOp) -> None:
        """Issue operations back to back, or capture them.

        Nothing that another thread launches on a stream with the same issue lock comes between.
        """
        capture = self._thread_state.capture
        if capture is not None:
            capture.ops.extend(ops)
            return
        with self._whole(), ExitStack() as guards:
            # All guards before any work: a batch is refused as a whole or not at all.
            for op in ops:
                guards.enter_context(op.guard())
            for op in ops:
                op.issue(self)

    def capture(self, program: Callable[[], object]) -> tuple[CpuStreamOp, ...]:
        """Capture what `program` issues here from the calling thread; nothing of it runs.

        Launches of other threads, and on other streams, are not affected.
        """
        if self._thread_state.capture is not None:
            raise Unsupported(f"stream {self._name} is being captured already")
        capture = self._thread_state.capture = _Capture()
        try:
            program()
        finally:
            self._thread_state.capture = None
        return tuple(capture.ops)

    def close(self, timeout: float) -> None:
        """End the worker after what is queued, waiting at most `timeout` seconds. A worker that
        hangs stays as a daemon thread."""
        with self._issue_lock:
            if not self._closed and self._worker is not None:
                self._queue.put(None)
            self._closed = True
        if self._worker is not None:
            self._worker.join(timeout)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Hold the issue lock. In one of this stream's own programs, defer tasks until it is
        released.

        A task that the worker runs in place may wait for another stream, whose programs may need
        the issue lock to continue.
        """
        if (
            threading.current_thread() is not self._worker
            or self._thread_state.deferred_tasks is not None
        ):
            with self._issue_lock:
                yield
            return
        tasks = self._thread_state.deferred_tasks = []
        try:
            with self._issue_lock:
                yield
        except BaseException as failure:
            for task in tasks:
                task.skip(failure)
            raise
        finally:
            self._thread_state.deferred_tasks = None
        _run_in_place(tasks)

    def _submit(self, task: _StreamTask) -> None:
        if threading.current_thread() is self._worker:
            if self._thread_state.deferred_tasks is None:
                task.run_in_place()
            else:
                self._thread_state.deferred_tasks.append(task)
            return
        # Under the lock, so that nothing is queued after the end marker that `close` puts.
        with self._issue_lock:
            if self._failure is not None:
                raise StreamFailed(
                    f"stream {self._name} failed: {self._failure}"
                ) from self._failure
            if self._closed:
                raise StreamFailed(f"stream {self._name} was closed")
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._worker.start()
            self._queue.put(task)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            with NATIVE_CALL_GUARD:
                self._run(task)
            del task  # else its tensors would live until the next task comes

    def _run(self, task: _StreamTask) -> None:
        if self._failure is None:
            try:
                task.run()
                return
            except BaseException as failure:  # raised by the next launch or wait
                self._failure = failure
        task.skip(self._failure)


def own_stream(stream: Stream) -> CpuStream:
    """`stream` itself. Raises `TypeError` for one of another backend."""
    if not isinstance(stream, CpuStream):
        raise TypeError(f"a stream of another backend: {stream!r}")
    return stream


def _run_in_place(tasks: Sequence[_StreamTask]) -> None:
    for index, task in enumerate(tasks):
        try:
            task.run_in_place()
        except BaseException as failure:
            for skipped in tasks[index + 1 :]:
                skipped.skip(failure)
            raise


class CpuGraph:
    """Captured operations; empty at first. A capture that raises leaves the graph as it was.

    A replay issues the operations again: it records events, acquires locks and checks leases anew.
    It is one launch: another thread's commit comes before all of it or after all of it (clause V4).
    """

    def __init__(self) -> None:
        self._ops: tuple[CpuStreamOp, ...] = ()

    def capture(self, stream: Stream, program: Callable[[], object]) -> None:
        """Capture what `program` launches on `stream` from this thread; nothing of it runs."""
        self._ops = own_stream(stream).capture(program)

    def replay(self, stream: Stream) -> None:
        """Launch the captured operations, on this stream or another."""
        own_stream(stream).issue(*self._ops)
