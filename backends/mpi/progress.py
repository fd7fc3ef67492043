"""Operations in flight over MPI, and the thread that drives them.

MPI makes no reliable progress by itself: a large message moves only while some thread calls into
the library. So one thread per fabric tests whatever is in flight. Several ranks may share a core,
so it sleeps while nothing is in flight, and longer and longer while nothing ends.
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
"""Bytes that one call of MPI_Test may move: MPICH passes collectives through shared memory in
portions of this size, one per call."""
MAX_EXTRA_TESTS = 100
"""Maximum additional tests of one operation in a row, so that one large operation does not keep the
thread from the others."""


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
    """The requests and buffers of one operation, kept until MPI does not use them any more.

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
        """Whether MPI is done with all requests; ends the work then, or at its deadline."""
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
        """Test the requests that are left, as often as their size calls for."""
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
        """Cancel receives that nothing has matched. MPI does not guarantee that sends can be
        cancelled."""
        self._withdrawn = True
        for request in self._requests:
            if request.expected_bytes is not None:
                request.request.Cancel()


BUSY_SECONDS = 0.0001
"""Seconds after the last end before the thread starts to pause: short operations end while it
spins."""
PAUSE_FRACTION = 0.1
"""A pause is this fraction of the time since an operation last began or ended, so that it adds at
most that to a wait, and ranks that share a core leave it to each other."""
MAX_PAUSE = 0.001
"""Maximum seconds of a pause while a caller may be waiting."""
QUARANTINE_PAUSE = 0.05
"""Seconds of a pause while only quarantined operations are left, which no caller waits for."""


class ProgressThread:
    """The operations in flight of a fabric, and the thread that polls them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inflight: list[MpiInflightOp] = []
        self._last_change = time.monotonic()
        self._close_reason = ""
        self._thread = threading.Thread(target=self._run, name="equipoise.mpi", daemon=True)
        self._thread.start()

    def add(self, inflight: MpiInflightOp) -> None:
        """Poll an operation from now on; its work fails at once if the thread has ended."""
        with self._changed:
            self._inflight.append(inflight)  # also then: MPI still uses its buffers
            self._last_change = time.monotonic()
            if self._close_reason:
                inflight.work.fail(self._close_reason)
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
            # Nothing else polls, nor looks at deadlines: what is in flight would never end.
            self._shut(f"lost its progress thread: {error!r}")
            raise

    def _await(self) -> bool:
        """Sleep until there is something to poll. Returns False once it was closed."""
        with self._changed:
            while not self._inflight and not self._close_reason:
                self._changed.wait()
            pause = self._pause()
            if pause and not self._close_reason:
                self._changed.wait(pause)
            return not self._close_reason

    def _pause(self) -> float:
        idle_seconds = time.monotonic() - self._last_change
        if idle_seconds < BUSY_SECONDS:
            return 0.0
        if all(inflight.work.done() for inflight in self._inflight):
            return QUARANTINE_PAUSE
        return min(PAUSE_FRACTION * idle_seconds, MAX_PAUSE)

    def _poll_all(self) -> None:
        with self._changed:
            operations = tuple(self._inflight)
        # Outside the lock, so that `add` does not wait for MPI.
        landed = {id(inflight) for inflight in operations if inflight.poll()}
        with self._changed:
            # From the list as it is now: `add` may have appended meanwhile.
            self._inflight = [inflight for inflight in self._inflight if id(inflight) not in landed]
            if landed:
                self._last_change = time.monotonic()

    def _shut(self, reason: str) -> None:
        with self._changed:
            self._close_reason = self._close_reason or reason
            operations = tuple(self._inflight)
            self._changed.notify()
        # Outside the lock: a failure calls communicators, which take locks of their own.
        for inflight in operations:
            inflight.work.fail(reason)
