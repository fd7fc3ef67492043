"""Waits that end: polling with a time-out, deadlines, and calls that are given up.

Vendors' own waits have no time-out. Neither have most calls of torch's store: if the process that
holds it is stopped (not gone), `set`, `check` and `compare_set` block for ever, and so does `wait`
whatever its time-out. So such calls run on a thread of their own, which the caller can give up.
"""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from equipoise.hal.errors import ControlPlaneLost
from equipoise.hal.support.native_call_guard import NATIVE_CALL_GUARD

SPIN_SECONDS = 50e-6
"""Seconds of polling without a pause: a sleep of any length takes about as long, and a hand-over of
a layer that ends just after a poll would be noticed up to a millisecond late."""
MIN_PAUSE = 20e-6
MAX_PAUSE = 1e-3
"""Seconds between two polls, doubling from the first to the second: short waits are noticed early,
and long ones use little of the processor."""


def poll(ready: Callable[[], bool], timeout: float) -> bool:
    """Poll until `ready`. Returns whether it was within `timeout` seconds. Polls at least once."""
    began, pause = time.monotonic(), MIN_PAUSE
    while not ready():
        elapsed = time.monotonic() - began
        if elapsed >= timeout:
            return False
        if elapsed >= SPIN_SECONDS:
            time.sleep(min(pause, timeout - elapsed))
            pause = min(2 * pause, MAX_PAUSE)
    return True


class Deadline:
    """A deadline on the monotonic clock that can also be ended early.

    Args:
        expiry: the time of the deadline.
        given_up: set to end it early.
    """

    def __init__(self, expiry: float, given_up: threading.Event) -> None:
        self._expiry = expiry
        self._given_up = given_up

    @property
    def remaining(self) -> float:
        """Seconds that are left, at least zero."""
        if self._given_up.is_set():
            return 0.0
        return max(self._expiry - time.monotonic(), 0.0)


T = TypeVar("T")


class _Call(Generic[T]):
    """One call and its result."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._claim = threading.Lock()
        self._end_event = threading.Event()
        self._outcome: list[T] = []
        self._error: BaseException | None = None

    @property
    def ended(self) -> bool:
        """Whether it has returned or raised."""
        return self._end_event.is_set()

    def run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        try:
            self._outcome.append(self._function())
        except BaseException as error:  # raised by `result`
            self._error = error
        self._end_event.set()

    def cancel(self) -> bool:
        """Prevent that it is made; returns False if it has begun."""
        return self._claim.acquire(blocking=False)

    def result(self, timeout: float) -> T:
        if not self._end_event.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._outcome[0]


class BoundedCalls:
    """Makes calls on a daemon thread, one after the other.

    The caller gives up a call that does not return in time. As long as it has not returned, every
    other call fails at once, so that a caller that ends waits for one time-out, not for many. When
    it has returned, its result is dropped and the next call is made: one late answer of a busy
    machine is not the end. A call that is given up before it began is never made.

    Args:
        callee: what is called, for errors.
    """

    def __init__(self, callee: str) -> None:
        self._callee = callee
        self._queue: SimpleQueue[_Call[object] | None] = SimpleQueue()
        self._late: _Call[object] | None = None
        self._closed = False
        threading.Thread(target=self._work, name=f"equipoise.{callee}", daemon=True).start()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def call(self, function: Callable[[], T], timeout: float) -> T:
        """What `function` returns or raises.

        Raises:
            ControlPlaneLost: it did not return within `timeout` seconds, an earlier one has still
                not returned, or these calls are closed.
        """
        if self._closed:
            raise ControlPlaneLost(f"the connection to {self._callee} is closed")
        late = self._late  # read once: another thread may replace it
        if late is not None and not late.ended:
            raise ControlPlaneLost(f"{self._callee} fell silent")
        pending = _Call(function)
        self._queue.put(pending)  # type: ignore[arg-type]
        try:
            return pending.result(timeout)
        except TimeoutError:
            if not pending.cancel():
                self._late = pending  # type: ignore[assignment]
            raise ControlPlaneLost(f"{self._callee} did not answer within {timeout:g} s") from None

    def close(self) -> None:
        """End the thread after its current call; later calls fail at once."""
        self._closed = True
        self._late = None  # what it refers to may refer to these calls
        self._queue.put(None)

    def _work(self) -> None:
        while (call := self._queue.get()) is not None and not self._closed:
            with NATIVE_CALL_GUARD:
                call.run()
            del call  # else what it refers to would live until the next call
