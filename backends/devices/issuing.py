"""A lock around everything that is issued: re-entrant, and first come, first served.

What is issued to a stream, in a form in which a graph can issue it again.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from equipoise.hal.stream import Stream


class IssueLock:
    """Held while something is issued, so that what belongs together is issued whole.

    A program runs while the gate is held: a commit of another thread then comes before all of it or
    after all of it (clause V4). A model's thread launches one program after the other, so the gate
    goes to whoever has waited longest; an ordinary lock would go back to the thread that has just
    given it up, and a mover would starve.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._depth = 0
        self._queue: deque[tuple[int, threading.Lock]] = deque()

    def __enter__(self) -> bool:
        thread = threading.get_ident()
        with self._lock:
            if self._owner in (0, thread):
                self._owner = thread
                self._depth += 1
                return True
            ticket_lock = threading.Lock()
            ticket_lock.acquire()
            self._queue.append((thread, ticket_lock))
        self._await((thread, ticket_lock))
        return True

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._pass_on()

    def _await(self, ticket: tuple[int, threading.Lock]) -> None:
        """Until the gate is handed over; an interrupt leaves no ticket behind."""
        try:
            ticket[1].acquire()
        except BaseException:
            with self._lock:
                if ticket in self._queue:
                    self._queue.remove(ticket)
                else:
                    self._pass_on()
            raise

    def _pass_on(self) -> None:
        self._owner, self._depth = 0, 0
        if self._queue:
            self._owner, ticket_lock = self._queue.popleft()
            self._depth = 1
            ticket_lock.release()


def _nothing(_: Stream) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class DeviceStreamOp:
    """Work for the device, and what the host does around it each time it is issued.

    A vendor graph keeps the work and nothing else: waits for events from outside, and recordings
    that somebody outside waits for, have no place in it. They belong to `around`, which a replay
    enters anew.

    Attributes:
        enqueue: enqueues the work on the vendor's stream that it is given, which is current.
        guard: entered before any verb that is issued with it; raises what forbids the verb.
        scope: entered around the work, on the stream that it is issued to.
    """

    enqueue: Callable[[Any], object]
    guard: Callable[[], AbstractContextManager[None]] = nullcontext
    scope: Callable[[Stream], AbstractContextManager[None]] = _nothing
