"""A send and its receive, compared through the control plane."""

import time
from dataclasses import dataclass

from equipoise.hal.control import ControlPlane
from equipoise.hal.errors import BallotIncomplete, OrderMismatch
from equipoise.hal.issued import Issued, describe
from equipoise.hal.stream import Stream
from equipoise.hal.work import Work


@dataclass(frozen=True)
class Pairing:
    """The n-th message from one rank to another.

    Attributes:
        control: carries both ends' ballots.
        question: that both ends answer.
        ranks: sender and receiver, numbers of the run.
    """

    control: ControlPlane
    question: str
    ranks: tuple[int, int]

    def cast(self, operation: Issued) -> None:
        """Say what this end issues."""
        self.control.cast(self.question, operation.to_bytes())

    def mismatch(self, timeout: float) -> OrderMismatch | None:
        """What is wrong between the two ends; None when nothing is.

        Raises `BallotIncomplete` when the peer has not issued its end within `timeout` seconds.
        """
        ballots = self.control.collect(self.question, timeout, self.ranks)
        ends = [Issued.from_bytes(ballot) for ballot in ballots]
        if ends[0].common == ends[1].common:
            return None
        return OrderMismatch(f"{self.question}: {describe(ends, self.ranks)}")


class CheckedWork:
    """A point-to-point operation whose other end is compared when somebody asks for the result.

    A mismatch cancels the operation, which fails its communicator: nothing that follows on this
    pair would match (P2).

    Args:
        inner: the operation itself.
        pairing: where both ends stand; this one has been cast.
        deadline: seconds from now until the operation fails by itself.
    """

    def __init__(self, inner: Work, pairing: Pairing, deadline: float) -> None:
        self._inner = inner
        self._pairing: Pairing | None = pairing
        self._expiry = time.monotonic() + deadline
        self._mismatch: OrderMismatch | None = None

    def done(self) -> bool:
        """Whether it ended; the ends are compared by then."""
        if not self._inner.done():
            return self._mismatch is not None
        self._compare(0.0)
        return True

    def wait(self, stream: Stream) -> None:
        """Order `stream` behind the operation; a mismatch shows when the host asks."""
        self._inner.wait(stream)

    def result(self, timeout: float) -> None:
        """Block until the end. Raises `OrderMismatch` besides what any operation raises."""
        expiry = time.monotonic() + timeout
        # An operation that fails by itself does so at its deadline: no ballot is awaited longer.
        self._compare(max(min(timeout, self._expiry - time.monotonic()), 0.0))
        if self._mismatch is not None:
            raise self._mismatch
        self._inner.result(max(expiry - time.monotonic(), 0.0))

    def cancel(self) -> None:
        """Stop waiting."""
        self._inner.cancel()

    def _compare(self, timeout: float) -> None:
        pairing = self._pairing
        if pairing is None:
            return
        try:
            self._mismatch = pairing.mismatch(timeout)
        except BallotIncomplete:
            return  # the operation itself says what became of it
        self._pairing = None
        if self._mismatch is not None:
            self._inner.cancel()
