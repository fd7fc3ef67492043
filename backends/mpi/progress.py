"""What MPI has under way for one operation.

The thread that drives MPI on.

MPI makes no reliable progress by itself: a large message moves only while somebody calls into the
library. So one thread a fabric tests whatever is under way. Several ranks share a core, so it
sleeps while nothing is, and longer and longer while nothing ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from torch import Tensor

from equipoise.backends.mpi.work import MpiWork

if TYPE_CHECKING:
    from mpi4py import MPI

BYTES_PER_TEST = 1 << 14
"""Bytes that a test may move: MPICH passes collectives through shared memory in such portions."""
MAX_EXTRA_TESTS = 100
"""Further tests in one go."""


@dataclass(frozen=True)
class MpiRequest:
    """One request of MPI.

    Attributes:
        request: what `Test` is asked of.
        expected_bytes: bytes that a receive must bring; None for anything but a receive.
    """

    request: MPI.Request
    expected_bytes: int | None = None


class MpiInflightOp:
    """The requests and the buffers of one operation, kept until MPI has let go of them.

    Its work may end earlier, by its deadline or cancelled. Then the flight is quarantined:
    receives are withdrawn, everything else is kept until its request really ended (clause K1).
    """

    def __init__(
        self,
        mpi: ModuleType,
        work: MpiWork,
        requests: Sequence[MpiRequest],
        buffers: Sequence[Tensor],
    ) -> None:
        self.work = work
        self._mpi = mpi
        self._requests = list(requests)
        self._buffers = tuple(buffers)
        self._burst = 1 + min(sum(b.nbytes for b in buffers) // BYTES_PER_TEST, MAX_EXTRA_TESTS)
        self._withdrawn = False

    def poll(self) -> bool:
        """Whether MPI has let go of everything; ends the work with that, or at its deadline."""
        self._test()
        if not self._requests:
            self._buffers = ()
            self.work.complete()
            return True
        self.work.expire()
        if self.work.done() and not self._withdrawn:
            self._withdraw()
        return False

    def _test(self) -> None:
        """Test what is left; as often as its size asks for, and not beyond its end."""
        for _ in range(self._burst):
            self._requests = [
                request for request in self._requests if not self._is_complete(request)
            ]
            if not self._requests:
                return

    def _is_complete(self, request: MpiRequest) -> bool:
        status = self._mpi.Status()
        try:
            if not request.request.Test(status):
                return False
        except self._mpi.Exception as error:
            self.work.fail(f"failed: {error}")
            return True
        if request.expected_bytes not in (None, status.Get_count(self._mpi.BYTE)):
            self.work.fail("received a message of another size")  # PyTorch #113376
        return True

    def _withdraw(self) -> None:
        """MPI can take back a receive that nothing has matched; of sends that is not promised."""
        self._withdrawn = True
        for request in self._requests:
            if request.expected_bytes is not None:
                request.request.Cancel()


BUSY_SECONDS = 0.0001
"""Seconds without an end before the thread starts to pause."""
PAUSE_FRACTION = 0.1
"""A pause is this part of the time since something last began or ended, and costs little of it."""
MAX_PAUSE = 0.001
"""Seconds of a pause while somebody may be waiting."""
QUARANTINE_PAUSE = 0.05
"""Seconds of a pause while only operations that nobody waits for any more are left."""


class ProgressThread:
    """Flights under way, and the thread that polls them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inflight: list[MpiInflightOp] = []
        self._last_change = time.monotonic()
        self._closed = ""
        self._thread = threading.Thread(target=self._run, name="equipoise.mpi", daemon=True)
        self._thread.start()

    def add(self, inflight: MpiInflightOp) -> None:
        """Take over a flight; its work fails at once when the thread has ended."""
        with self._changed:
            self._inflight.append(inflight)  # even then: its buffers are MPI's
            self._last_change = time.monotonic()
            if self._closed:
                inflight.work.fail(self._closed)
            self._changed.notify()

    def stop(self, timeout: float) -> tuple[MpiInflightOp, ...]:
        """End the thread, within `timeout` seconds, and what is under way, with an error.

        Returns the flights that MPI has not let go of: they must be kept for ever.
        """
        self._shut("was closed")
        self._thread.join(timeout)
        return tuple(self._inflight)

    def _run(self) -> None:
        try:
            while self._await():
                self._poll_all()
        except BaseException as error:
            self._shut(f"lost its progress thread: {error!r}")
            raise

    def _await(self) -> bool:
        """Sleep until there is something to poll; false when there never will be."""
        with self._changed:
            while not self._inflight and not self._closed:
                self._changed.wait()
            pause = self._pause()
            if pause and not self._closed:
                self._changed.wait(pause)
            return not self._closed

    def _pause(self) -> float:
        waited = time.monotonic() - self._last_change
        if waited < BUSY_SECONDS:
            return 0.0
        if all(inflight.work.done() for inflight in self._inflight):
            return QUARANTINE_PAUSE
        return min(PAUSE_FRACTION * waited, MAX_PAUSE)

    def _poll_all(self) -> None:
        with self._changed:
            operations = tuple(self._inflight)
        landed = {id(inflight) for inflight in operations if inflight.poll()}
        with self._changed:
            self._inflight = [inflight for inflight in self._inflight if id(inflight) not in landed]
            if landed:
                self._last_change = time.monotonic()

    def _shut(self, reason: str) -> None:
        with self._changed:
            self._closed = self._closed or reason
            operations = tuple(self._inflight)
            self._changed.notify()
        for inflight in operations:
            inflight.work.fail(reason)
