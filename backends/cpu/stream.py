"""Streams as worker threads, events as points in their queues."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue

from equipoise.hal.errors import EventNotRecorded, StreamFailed, StreamTimeout
from equipoise.hal.stream import Event, Role

PATIENCE = 600.0
"""Seconds that one stream waits for an event of another before it fails."""


@dataclass(eq=False)
class _Mark:
    """One recording of an event: reached, or failed together with its stream."""

    reached: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None

    def fail(self, failure: BaseException) -> None:
        self.failure = failure
        self.reached.set()

    def wait(self, timeout: float, what: str) -> None:
        if not self.reached.wait(timeout):
            raise StreamTimeout(f"{what} was not reached within {timeout:g} s")
        if self.failure is not None:
            raise StreamFailed(f"{what} failed: {self.failure}") from self.failure


class CpuEvent:
    """The latest recording; whoever waits keeps the recording it saw."""

    def __init__(self) -> None:
        self._mark: _Mark | None = None

    def query(self) -> bool:
        """Whether the latest recording has been reached."""
        mark = self._mark
        return mark is not None and mark.reached.is_set()

    def synchronize(self, timeout: float) -> None:
        """Block until the latest recording is reached."""
        self.latest().wait(timeout, "the event")

    def latest(self) -> _Mark:
        """The latest recording. Raises `EventNotRecorded`."""
        if self._mark is None:
            raise EventNotRecorded("nothing was ever recorded into this event")
        return self._mark

    def renew(self) -> _Mark:
        """Start a new recording; earlier waiters keep the old one."""
        self._mark = _Mark()
        return self._mark


@dataclass(frozen=True)
class _Task:
    """A program and, for recordings, the mark that must not stay behind if it never runs."""

    run: Callable[[], object]
    mark: _Mark | None = None


class CpuStream:
    """A worker thread and its queue; the thread starts with the first launch.

    An exception in a program fails the stream for good: later programs are skipped, every
    recording fails with the same cause, and `launch` and `synchronize` raise it.
    """

    def __init__(self, role: Role, name: str) -> None:
        self._role = role
        self._name = f"{name}.{role}"
        self._queue: SimpleQueue[_Task | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._worker: threading.Thread | None = None
        self._closed = False
        self._gate = threading.Lock()

    @property
    def role(self) -> Role:
        """What the stream is for."""
        return self._role

    @contextmanager
    def current(self) -> Iterator[None]:
        """Nothing follows the current stream here: gloo is not ordered by streams (clause X6)."""
        yield

    def launch(self, program: Callable[[], object]) -> None:
        """Enqueue `program`, or run it at once when called from one of this stream's programs."""
        self._submit(_Task(program))

    def record(self, event: Event) -> None:
        """Enqueue the point that `event` now stands for."""
        mark = _own(event).renew()
        try:
            self._submit(_Task(mark.reached.set, mark))
        except StreamFailed as refusal:
            # Whoever waits for the event must not wait for a point that can never come.
            mark.fail(refusal.__cause__ or refusal)
            raise

    def wait(self, event: Event) -> None:
        """Make the worker wait for the latest recording of `event`."""
        mark = _own(event).latest()
        self._submit(_Task(lambda: mark.wait(PATIENCE, f"an event that {self._name} waits for")))

    def synchronize(self, timeout: float) -> None:
        """Block until the queue has drained up to here."""
        if self._worker is None and not self._closed:
            return  # nothing was ever launched
        done = CpuEvent()
        self.record(done)
        done.latest().wait(timeout, f"the end of stream {self._name}")

    def close(self, timeout: float) -> None:
        """End the worker after what is queued; a worker that hangs is left behind as a daemon."""
        with self._gate:
            if not self._closed and self._worker is not None:
                self._queue.put(None)
            self._closed = True
        if self._worker is not None:
            self._worker.join(timeout)

    def _submit(self, task: _Task) -> None:
        if threading.current_thread() is self._worker:
            task.run()
            return
        # Under the lock, so that nothing is queued behind the end that `close` puts.
        with self._gate:
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
            self._run(task)

    def _run(self, task: _Task) -> None:
        if self._failure is None:
            try:
                task.run()
                return
            except BaseException as failure:  # the host hears it at the next launch or wait
                self._failure = failure
        if task.mark is not None:
            task.mark.fail(self._failure)


def _own(event: Event) -> CpuEvent:
    if not isinstance(event, CpuEvent):
        raise TypeError(f"an event of another backend: {event!r}")
    return event
