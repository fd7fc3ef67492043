"""A communicator that holds every message back, where no link can be made: a delay in the HAL.

Bytes travel as fast as this machine has them; a message *ends* no earlier than it would on the
link. It begins when it really has come, which takes both ends; then it is in a queue with others
that leave for, or come from, the same peer, `bytes / rate` each, and `latency` behind that it is
there. A sender does not wait for the latency: its last byte has left before.

The contract holds: nothing blocks the host (P1), messages end in the order in which they were
issued (P2), and a message keeps its tensor until it has ended (K1).
"""

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from emulated_device import now, wait_until
from link_place import Asked
from torch import Tensor

from equipoise.hal.communicator import Communicator, Fabric
from equipoise.hal.errors import CommunicatorFailed, ResultPending
from equipoise.hal.stream import Stream
from equipoise.hal.work import Work

MARGIN = 5.0
"""Seconds beyond an operation's own deadline until the one who watches it gives up."""


class DelayedWork:
    """A message: ended when it really has, and its time on the link is over. See `Work`.

    Args:
        inner: the message.
        tensor: that it sends or receives.
    """

    def __init__(self, inner: Work, tensor: Tensor) -> None:
        self.inner = inner
        self.nbytes = tensor.nbytes
        self._tensor: Tensor | None = tensor
        self._known = threading.Event()
        self._due = 0.0
        self._failure: CommunicatorFailed | None = None

    def done(self) -> bool:
        """See `Work`."""
        ended = self._known.is_set() and now() >= self._due
        if ended:
            self._tensor = None
        return ended

    def wait(self, stream: Stream) -> None:
        """See `Work`."""
        stream.launch(self._await)

    def result(self, timeout: float) -> None:
        """See `Work`."""
        expires = now() + timeout
        if not self._known.wait(timeout) or self._due > expires:
            time.sleep(max(0.0, expires - now()))
            raise ResultPending(f"a delayed message has not ended within {timeout:g} s")
        self._await()

    def cancel(self) -> None:
        """See `Work`."""
        self.inner.cancel()

    def book(self, due: float) -> None:
        """It will end then."""
        self._due = due
        self._known.set()

    def fail(self, failure: CommunicatorFailed) -> None:
        """It has ended badly."""
        self._failure = failure
        self._tensor = None
        self._known.set()

    def _await(self) -> None:
        self._known.wait()  # bounded: whoever watches the message books it or fails it
        if self._failure is not None:
            raise self._failure
        wait_until(self._due)
        self._tensor = None


class Lane:
    """Messages one way between this rank and a peer, serial.

    Args:
        name: of its thread.
        rate: bytes per second.
        latency: seconds until what has left is there.
        deadline: seconds that a message may take.
    """

    def __init__(self, name: str, rate: float, latency: float, deadline: float) -> None:
        self._rate = rate
        self._latency = latency
        self._deadline = deadline
        self._free = 0.0
        self._issued: queue.SimpleQueue[DelayedWork | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    def add(self, work: DelayedWork) -> DelayedWork:
        """Behind all others."""
        self._issued.put(work)
        return work

    def close(self) -> None:
        """Behind the last message."""
        self._issued.put(None)
        self._thread.join(self._deadline)

    def _watch(self) -> None:
        while (work := self._issued.get()) is not None:
            try:
                work.inner.result(self._deadline + MARGIN)
            except CommunicatorFailed as failure:
                work.fail(failure)
            except ResultPending as pending:
                work.fail(CommunicatorFailed(str(pending)))
            else:
                self._free = max(self._free, now()) + work.nbytes / self._rate
                work.book(self._free + self._latency)


class DelayedCommunicator:
    """A communicator whose point-to-point messages take their time; all else is its own.

    Args:
        inner: the communicator.
        asked: latency and rate.
        deadline: seconds, that of its operations.
    """

    def __init__(self, inner: Communicator, asked: Asked, deadline: float) -> None:
        self._inner = inner
        self._asked = asked
        self._deadline = deadline
        self._issuing = threading.Lock()
        self._lanes: dict[str, Lane] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def isend(self, tensor: Tensor, destination: int) -> Work:
        """See `Communicator`."""
        with self._issuing:  # so that a lane has messages in the order of issue
            inner = self._inner.isend(tensor, destination)
            return self._lane(f"to {destination}", 0.0).add(DelayedWork(inner, tensor))

    def irecv(self, tensor: Tensor, source: int) -> Work:
        """See `Communicator`."""
        with self._issuing:
            inner = self._inner.irecv(tensor, source)
            lane = self._lane(f"from {source}", self._asked.latency)
            return lane.add(DelayedWork(inner, tensor))

    def close(self) -> None:
        """See `Communicator`."""
        for lane in self._lanes.values():
            lane.close()
        self._inner.close()

    def _lane(self, name: str, latency: float) -> Lane:
        if name not in self._lanes:
            self._lanes[name] = Lane(name, self._asked.rate, latency, self._deadline)
        return self._lanes[name]


class DelayedFabric:
    """A fabric whose communicators hold messages back.

    Args:
        inner: the fabric.
        asked: latency and rate of every pair of ranks.
        deadline: seconds, that of its operations.
    """

    def __init__(self, inner: Fabric, asked: Asked, deadline: float) -> None:
        self._inner = inner
        self._asked = asked
        self._deadline = deadline
        self._opened: list[DelayedCommunicator] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open(self, purpose: str, ranks: Sequence[int] | None = None) -> Communicator:
        """See `Fabric`."""
        inner = self._inner.open(purpose, ranks)
        self._opened.append(DelayedCommunicator(inner, self._asked, self._deadline))
        return self._opened[-1]  # type: ignore[return-value]

    def close(self) -> None:
        """See `Fabric`."""
        for opened in self._opened:
            opened.close()
        self._inner.close()
