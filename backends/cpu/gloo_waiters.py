"""Threads that wait for gloo's point-to-point messages.

A message of gloo is not complete until some thread waits for it, and a thread per message costs as
much as a small message takes. Messages to one rank end in the order in which they were sent, those
from one rank in the order in which they are waited for. So one thread per direction and rank waits
for them in turn, and none is noticed late.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from equipoise.hal.support.native_call_guard import NATIVE_CALL_GUARD

Wait = Callable[[], object]


class WaiterThreads:
    """A queue and a thread per direction and rank, made with the first message.

    Args:
        owner: name of the communicator, for the names of threads.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._queues: dict[str, SimpleQueue[Wait | None]] = {}
        self._opening = threading.Lock()

    def put(self, queue: str, wait: Wait) -> None:
        """Call `wait`, which must not raise, on the thread of `queue`, after what was put
        before."""
        with self._opening:
            if queue not in self._queues:
                self._queues[queue] = SimpleQueue()
                work, name = self._queues[queue], f"{queue} of {self._owner!r}"
                threading.Thread(target=_work, args=(work,), name=name, daemon=True).start()
            # Under the lock: after the end mark of a `close` in between, nobody would take it.
            self._queues[queue].put(wait)

    def close(self) -> None:
        """End every thread after what is queued; later calls of `put` start new ones."""
        with self._opening:
            for queue in self._queues.values():
                queue.put(None)
            self._queues.clear()


def _work(queue: "SimpleQueue[Wait | None]") -> None:
    while (wait := queue.get()) is not None:
        with NATIVE_CALL_GUARD:
            wait()
        del wait  # else its tensors would live until the next message comes
