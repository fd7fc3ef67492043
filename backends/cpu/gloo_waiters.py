"""Threads that wait for messages to their end.

Gloo's message is not complete until somebody waits for it, and a thread for each message costs as
much as a small message takes. Messages to one rank end in the order in which they were sent, and
those from one rank in that in which they were awaited: so one thread for each direction and rank
waits for them in turn, and none is noticed late.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from equipoise.hal.support.native_call_guard import NATIVE_CALL_GUARD

Wait = Callable[[], object]


class WaiterThreads:
    """A queue and a thread for each direction and rank, from the first message on.

    Args:
        owner: the communicator, in names of threads.
    """

    def __init__(self, owner: str) -> None:
        self._whose = owner
        self._queues: dict[str, SimpleQueue[Wait | None]] = {}
        self._opening = threading.Lock()

    def put(self, queue: str, wait: Wait) -> None:
        """Have `wait`, which never raises, called behind what was put there before."""
        with self._opening:
            if queue not in self._queues:
                self._queues[queue] = SimpleQueue()
                work, name = self._queues[queue], f"{queue} of {self._whose!r}"
                threading.Thread(target=_work, args=(work,), name=name, daemon=True).start()
            self._queues[queue].put(wait)

    def close(self) -> None:
        """End every thread once it is through; later calls of `put` open new ones."""
        with self._opening:
            for queue in self._queues.values():
                queue.put(None)
            self._queues.clear()


def _work(queue: "SimpleQueue[Wait | None]") -> None:
    while (wait := queue.get()) is not None:
        with NATIVE_CALL_GUARD:
            wait()
        del wait  # a work holds what its owner gave it, and the thread may sleep for long
