"""The issue lock, under which everything is launched, and the operation that a graph can repeat."""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from equipoise.hal.stream import Stream


class IssueLock:
    """A re-entrant lock, first come first served, that is held while work is launched.

    A program runs with the lock held, so a commit of another thread comes before all of it or after
    all of it (clause V4). The lock is fair: a model's thread launches one program after the other,
    and an ordinary lock would usually go back to the thread that has just released it, so that the
    writer would starve.
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
            # A lock of its own per waiter: it is released by whoever passes the issue lock on, and
            # so wakes exactly this thread.
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
        """Wait until the lock is passed to this thread. An interrupt (Ctrl-C, a signal handler that
        raises) removes the ticket, or passes the lock on if it has just arrived."""
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
        # Handed to the first waiter while `_lock` is held: nobody can overtake it in between.
        if self._queue:
            self._owner, ticket_lock = self._queue.popleft()
            self._depth = 1
            ticket_lock.release()


def _nothing(_: Stream) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class DeviceStreamOp:
    """Work for the device, and what the host does around it each time it is issued.

    A vendor graph keeps the work only. Waits for events from outside the graph, and recordings that
    other streams wait for, cannot be captured; they belong to `scope`, which every replay enters
    again.

    Attributes:
        enqueue: enqueues the work on a stream of the vendor's, which is current.
        guard: entered before any operation of the batch is issued; raises if it is forbidden, so
            that a refused batch has launched nothing.
        scope: entered around the work, on the stream that it is issued to.
    """

    enqueue: Callable[[Any], object]
    guard: Callable[[], AbstractContextManager[None]] = nullcontext
    scope: Callable[[Stream], AbstractContextManager[None]] = _nothing
