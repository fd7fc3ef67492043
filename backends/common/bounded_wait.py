"""Bounded waiting: the vendor's own waits know no time-out.

How long a wait may last.

Calls that may never return, made to.

torch's store has no time-out of its own for most calls: where the process that holds it is stopped
rather than gone, `set`, `check` and `compare_set` block for ever, and so does a `wait` whatever its
time-out. So such calls run on a thread of their own, and the caller stops waiting in time.
"""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from equipoise.hal.errors import ControlPlaneLost
from equipoise.hal.support.native_call_guard import NATIVE_CALL_GUARD

SPIN_SECONDS = 50e-6
"""Seconds of looks without a pause: a sleep of any length costs as much, and a look behind the end
of a layer's hand-over would come up to a millisecond late."""
MIN_PAUSE = 20e-6
MAX_PAUSE = 1e-3
"""Seconds between two looks; they double."""


def poll(ready: Callable[[], bool], timeout: float) -> bool:
    """Look until `ready`; whether it was within `timeout` seconds. Looks once at least."""
    began, pause = time.monotonic(), MIN_PAUSE
    while not ready():
        waited = time.monotonic() - began
        if waited >= timeout:
            return False
        if waited >= SPIN_SECONDS:
            time.sleep(min(pause, timeout - waited))
            pause = min(2 * pause, MAX_PAUSE)
    return True


class Deadline:
    """Until a moment of the monotonic clock, or until somebody gives up.

    Args:
        expiry: the moment.
        given_up: set when nobody wants the outcome any more.
    """

    def __init__(self, expiry: float, given_up: threading.Event) -> None:
        self._expiry = expiry
        self._given_up = given_up

    @property
    def remaining(self) -> float:
        """Seconds that are left, not below zero."""
        if self._given_up.is_set():
            return 0.0
        return max(self._expiry - time.monotonic(), 0.0)


T = TypeVar("T")


class _Call(Generic[T]):
    """One call and what became of it."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._ended = threading.Event()
        self._outcome: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._outcome.append(self._function())
        except BaseException as error:  # the caller hears it
            self._error = error
        self._ended.set()

    def result(self, timeout: float) -> T:
        if not self._ended.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._outcome[0]


class BoundedCalls:
    """A daemon thread that makes calls one after the other.

    Once a call has not returned in time the thread is given up, and every later call fails at
    once: whoever did not answer may answer late, and nobody must take that for the next answer.

    Args:
        whom: who is called, for errors.
    """

    def __init__(self, whom: str) -> None:
        self._whom = whom
        self._queue: SimpleQueue[_Call[object]] = SimpleQueue()
        self._timed_out = False
        threading.Thread(target=self._work, name=f"equipoise.{whom}", daemon=True).start()

    def call(self, function: Callable[[], T], timeout: float) -> T:
        """What `function` returns or raises; `ControlPlaneLost` after `timeout` seconds."""
        if self._timed_out:
            raise ControlPlaneLost(f"{self._whom} fell silent")
        made = _Call(function)
        self._queue.put(made)  # type: ignore[arg-type]
        try:
            return made.result(timeout)
        except TimeoutError:
            self._timed_out = True
            raise ControlPlaneLost(f"{self._whom} did not answer within {timeout:g} s") from None

    def close(self) -> None:
        """End the thread once it is through with its call; later calls fail at once."""
        self._timed_out = True
        self._queue.put(_Call(lambda: None))

    def _work(self) -> None:
        while not self._timed_out:
            call = self._queue.get()
            with NATIVE_CALL_GUARD:
                call.run()
            del call  # what it closed over is free while the thread waits for another
