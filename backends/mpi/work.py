"""Handles of MPI operations."""

import threading
import time
from collections.abc import Callable

from equipoise.hal.errors import CommunicatorFailed, OperationTimeout, ResultPending
from equipoise.hal.stream import Stream

REPORT_SLACK = 5.0
"""Seconds beyond the deadline that the progress thread may take to notice it."""


class MpiWork:
    """One operation as its issuer sees it; what MPI still does with it is its `Flight`'s business.

    Args:
        what: the operation in words, for errors.
        deadline: seconds from now until the operation fails its communicator.
        ended: called once, before anybody sees the end.
        failed: called with every failure, before anybody sees it.
    """

    def __init__(
        self,
        what: str,
        deadline: float,
        ended: Callable[[], None],
        failed: Callable[[CommunicatorFailed], None],
    ) -> None:
        self._label = what
        self._expiry = time.monotonic() + deadline
        self._on_ended = ended
        self._on_failed = failed
        self._failure: CommunicatorFailed | None = None
        self._ending = threading.Lock()
        self._end_event = threading.Event()

    def done(self) -> bool:
        """Whether the operation ended, well or not."""
        return self._end_event.is_set()

    def wait(self, stream: Stream) -> None:
        """Make `stream` wait for the end. Raises what it has failed with already (clause E10)."""
        if self.done():
            self._raise_failure()
        stream.launch(lambda: self.result(self._remaining() + REPORT_SLACK))

    def result(self, timeout: float) -> None:
        """Block until the end; raises `ResultPending` after `timeout` seconds."""
        if not self._end_event.wait(max(timeout, 0.0)):
            raise ResultPending(f"{self._label} has not ended within {timeout:g} s")
        self._raise_failure()

    def cancel(self) -> None:
        """Stop waiting; the flight keeps the buffers until MPI lets go of them (clause E4).

        Fails the communicator even after the end: whether that came first is a matter of luck.
        """
        failure = CommunicatorFailed(f"{self._label} was cancelled")
        self._on_failed(failure)
        self._end(failure)

    def expire(self) -> None:
        """End it with `OperationTimeout` if its deadline has passed."""
        if not self.done() and self._remaining() <= 0.0:
            self._end(OperationTimeout(f"{self._label} passed its deadline"))

    def complete(self) -> None:
        """End it well, unless it has ended."""
        self._end(None)

    def fail(self, reason: str) -> None:
        """End it with `CommunicatorFailed`, unless it has ended."""
        self._end(CommunicatorFailed(f"{self._label} {reason}"))

    def _end(self, failure: CommunicatorFailed | None) -> None:
        with self._ending:
            if self._end_event.is_set():
                return
            # In this order: whoever sees the end finds its failure, and the communicator failed
            # already.
            self._failure = failure
            if failure is not None:
                self._on_failed(failure)
            self._on_ended()
            self._end_event.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            # Afresh: a kept exception would keep the frames that it was raised through, and what
            # MPI never lets go of is kept for ever (R1).
            raise type(self._failure)(str(self._failure))

    def _remaining(self) -> float:
        return self._expiry - time.monotonic()
