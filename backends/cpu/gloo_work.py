"""Handles of gloo operations.

Measured with torch 2.13: a point-to-point work of gloo is never complete until a thread waits for
it, and a wait with a time-out shorter than the group's breaks the whole group. So nothing here
waits with a short time-out: a soft wait polls a thread that waits to the end.
"""

import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from equipoise.backends.cpu.stream import Latch
from equipoise.hal.errors import CommunicatorFailed, OperationTimeout, ResultPending
from equipoise.hal.stream import Stream
from equipoise.hal.support.native_call_guard import NATIVE_CALL_GUARD

REPORT_SLACK = 5.0
"""Seconds after the deadline in which gloo may still report it: its own time-out is the deadline,
and its report comes a little later."""
MIN_WAIT = 0.001
"""Seconds of a wait that begins after the operation's deadline: an operation that has ended by then
ended well."""


class GlooWork:
    """One operation, or a bundle that ends together; owns its tensors until the end.

    Args:
        finish: blocks until the operation ended, or raises after so many seconds.
        buffers: tensors that the operation reads or writes.
        what: the operation in words, for errors.
        deadline: seconds from now until the operation fails its communicator.
        failed: called once with the failure, so that the communicator learns of it.
        ended: called once with the work after the end, well or not.
    """

    def __init__(
        self,
        finish: Callable[[float], None],
        buffers: Sequence[Tensor],
        what: str,
        deadline: float,
        failed: Callable[[CommunicatorFailed], None],
        ended: Callable[["GlooWork"], None],
    ) -> None:
        self.buffers = tuple(buffers)
        self._finish = finish
        self._label = what
        self._expiry = time.monotonic() + deadline
        self._on_failed = failed
        self._on_ended = ended
        self._failure: CommunicatorFailed | None = None
        self._end_latch = Latch()
        self._settling = threading.Lock()
        self._finishing = threading.Lock()
        self._finished = False
        self._watched = False

    def done(self) -> bool:
        """Whether the operation ended, well or not."""
        if not self._end_latch.is_set():
            self.watch()
        return self._end_latch.is_set()

    def wait(self, stream: Stream) -> None:
        """Make `stream` wait for the end. Raises what it has failed with already (clause E10)."""
        if self._end_latch.is_set():
            self._raise_failure()
        stream.launch(lambda: self.result(self._remaining() + REPORT_SLACK))

    def result(self, timeout: float) -> None:
        """Block until the end; raises `ResultPending` after `timeout` seconds."""
        if not self._end_latch.is_set():
            self._await(timeout)
        self._raise_failure()

    def cancel(self) -> None:
        """End it for its issuer; a watcher keeps the buffers until gloo lets go of them (E4).

        Fails the communicator even after the end: whether that came first is a matter of luck.
        """
        self.watch()
        failure = CommunicatorFailed(f"{self._label} was cancelled")
        self._on_failed(failure)
        self._settle(failure)

    def watch(self, by: Callable[[Callable[[], None]], object] | None = None) -> None:
        """Have somebody wait to the end, unless one does: `by`, or else a thread of its own."""
        with self._finishing_or_skip() as has_lock:
            if has_lock and not self._watched and not self._end_latch.is_set():
                self._watched = True
                (by or self._by_a_thread)(self._end)

    def poll(self, completed: Callable[[], bool]) -> bool:
        """Whether it ended, for operations that gloo can poll; never blocks."""
        if not self._end_latch.is_set() and completed():
            self._end()
        return self._end_latch.is_set()

    def _await(self, timeout: float) -> None:
        if timeout >= self._remaining():
            self._end()
            return
        self.watch()
        if not self._end_latch.wait(timeout):
            raise ResultPending(f"{self._label} has not ended within {timeout:g} s")

    def _end(self) -> None:
        with self._finishing:
            if self._finished:
                return
            failure: CommunicatorFailed | None = None
            try:
                self._finish(max(self._remaining(), MIN_WAIT))
            except RuntimeError as error:
                failure = _explain(self._label, error)
                failure.__cause__ = error
                self._on_failed(failure)
            self._finish = _nothing
            self.buffers = ()  # the work itself may be kept for long
            self._finished = True
            self._settle(failure)
        self._on_ended(self)  # not under the lock: the communicator asks its other operations

    def _settle(self, failure: CommunicatorFailed | None) -> None:
        """Let everybody know of the end, unless a cancel came first."""
        with self._settling:
            if not self._end_latch.is_set():
                self._failure = failure
                self._end_latch.set()

    def _raise_failure(self) -> None:
        """Afresh: a kept exception grows by the frames of everybody who it is raised to."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure)) from self._failure.__cause__

    def _by_a_thread(self, wait: Callable[[], None]) -> None:
        threading.Thread(target=NATIVE_CALL_GUARD(wait), name=self._label, daemon=True).start()

    def _remaining(self) -> float:
        return self._expiry - time.monotonic()

    def _finishing_or_skip(self) -> "_Attempt":
        return _Attempt(self._finishing)


class _Attempt:
    """Holds a lock if it is free; enters with whether it is held."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._has_lock = False

    def __enter__(self) -> bool:
        self._has_lock = self._lock.acquire(blocking=False)
        return self._has_lock

    def __exit__(self, *_: object) -> None:
        if self._has_lock:
            self._lock.release()


def _nothing(_: float) -> None:
    """Stands where `finish` stood, so that what it closed over can go."""


def _explain(label: str, error: RuntimeError) -> CommunicatorFailed:
    text = str(error).splitlines()[0]
    if "imed out" in text or "timeout" in text.lower():
        return OperationTimeout(f"{label} passed its deadline")
    return CommunicatorFailed(f"{label} lost its peer")
