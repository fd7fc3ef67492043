"""What MPI has under way for one operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from torch import Tensor

from equipoise.backends.mpi.work import MpiWork

if TYPE_CHECKING:
    from mpi4py import MPI

CELL = 1 << 14
"""Bytes that a test may move: MPICH passes collectives through shared memory in such portions."""
MOST = 100
"""Further tests in one go."""


@dataclass(frozen=True)
class Leg:
    """One request of MPI.

    Attributes:
        request: what `Test` is asked of.
        arriving: bytes that a receive must bring; None for anything but a receive.
    """

    request: MPI.Request
    arriving: int | None = None


class Flight:
    """The requests and the buffers of one operation, kept until MPI has let go of them.

    Its work may end earlier, by its deadline or cancelled. Then the flight is quarantined:
    receives are withdrawn, everything else is kept until its request really ended (clause K1).
    """

    def __init__(
        self, mpi: ModuleType, work: MpiWork, legs: Sequence[Leg], buffers: Sequence[Tensor]
    ) -> None:
        self.work = work
        self._mpi = mpi
        self._legs = list(legs)
        self._buffers = tuple(buffers)
        self._burst = 1 + min(sum(b.nbytes for b in buffers) // CELL, MOST)
        self._withdrawn = False

    def poll(self) -> bool:
        """Whether MPI has let go of everything; ends the work with that, or at its deadline."""
        self._test()
        if not self._legs:
            self._buffers = ()
            self.work.land()
            return True
        self.work.expire()
        if self.work.done() and not self._withdrawn:
            self._withdraw()
        return False

    def _test(self) -> None:
        """Test what is left; as often as its size asks for, and not beyond its end."""
        for _ in range(self._burst):
            self._legs = [leg for leg in self._legs if not self._landed(leg)]
            if not self._legs:
                return

    def _landed(self, leg: Leg) -> bool:
        status = self._mpi.Status()
        try:
            if not leg.request.Test(status):
                return False
        except self._mpi.Exception as error:
            self.work.fail(f"failed: {error}")
            return True
        if leg.arriving not in (None, status.Get_count(self._mpi.BYTE)):
            self.work.fail("received a message of another size")  # PyTorch #113376
        return True

    def _withdraw(self) -> None:
        """MPI can take back a receive that nothing has matched; of sends that is not promised."""
        self._withdrawn = True
        for leg in self._legs:
            if leg.arriving is not None:
                leg.request.Cancel()
