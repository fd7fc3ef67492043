"""What a communicator runs over: MPI communicators of its own, and whether they are still sound."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.backends.mpi.flight import Flight, Leg
from equipoise.backends.mpi.progress import Progress
from equipoise.backends.mpi.spans import numbers
from equipoise.backends.mpi.work import MpiWork
from equipoise.hal.errors import CommunicatorFailed, ResultPending

if TYPE_CHECKING:
    from mpi4py import MPI

Start = Callable[["MPI.Intracomm"], Leg]
"""Starts one request."""


class Line:
    """Issues operations in order, fails with the first of them that does, and parts in the end.

    Args:
        mpi: mpi4py's module.
        traffic: the operations' communicator.
        farewell: the same ranks; carries one operation, that of parting.
        purpose: what it is for, for errors.
        deadline: seconds that an operation may take.
        progress: drives what is under way.
    """

    def __init__(
        self,
        mpi: ModuleType,
        traffic: MPI.Intracomm,
        farewell: MPI.Intracomm,
        purpose: str,
        deadline: float,
        progress: Progress,
    ) -> None:
        self.mpi = mpi
        self.purpose = purpose
        self.rank: int = traffic.rank
        self.size: int = traffic.size
        self._traffic = traffic
        self._farewell = farewell
        self._deadline = deadline
        self._progress = progress
        self._failure: CommunicatorFailed | None = None
        self._pending = 0
        self._collectives = 0
        self._verdict = torch.zeros(3, dtype=torch.int64)
        self._parting: MpiWork | None = None
        self._issuing = threading.Lock()
        self._counting = threading.Lock()

    def collective(
        self, what: str, start: Callable[[MPI.Intracomm], MPI.Request], *buffers: Tensor
    ) -> MpiWork:
        """Issue an operation of all ranks, which is one request."""
        with self._issuing:
            work = self._issue(what, [lambda traffic: Leg(start(traffic))], buffers)
            self._collectives += 1
        return work

    def issue(self, what: str, starts: Sequence[Start], buffers: Sequence[Tensor]) -> MpiWork:
        """Issue an operation whole, whatever other threads do (clause P6)."""
        with self._issuing:
            return self._issue(what, starts, buffers)

    def refuse_failed(self, what: str) -> None:
        """Raise `CommunicatorFailed` after a failure, and after closing (clause E2)."""
        if self._failure is not None:
            raise CommunicatorFailed(f"{what} of {self.purpose!r}: {self._failure}")

    def close(self) -> None:
        """Take no more operations, and tell the others in what state it ends; does not wait."""
        with self._issuing:
            if self._parting is None:
                self._parting = self._part()

    def release(self, timeout: float) -> bool:
        """Free MPI's communicators; false when not every rank closes within `timeout` seconds.

        Where the ranks did not all end sound and level, something may still be on its way, and MPI
        would deliver it to the next communicator that gets the same context: that one is kept.
        """
        if self._parting is None:
            return False
        try:
            self._parting.result(timeout)
        except (ResultPending, CommunicatorFailed):
            return False
        sound, fewest, most = self._verdict.tolist()
        if sound and fewest == -most:
            self._traffic.Free()
        self._farewell.Free()
        return True

    def _issue(self, what: str, starts: Sequence[Start], buffers: Sequence[Tensor]) -> MpiWork:
        self.refuse_failed(what)
        with self._counting:
            self._pending += 1
        work = MpiWork(f"{what} of {self.purpose!r}", self._deadline, self._ended, self._failed)
        legs: list[Leg] = []
        try:
            for start in starts:
                legs.append(start(self._traffic))
        except self.mpi.Exception as error:
            work.fail(f"was not started: {error}")
        self._progress.add(Flight(self.mpi, work, legs, buffers))
        return work

    def _ended(self) -> None:
        with self._counting:
            self._pending -= 1

    def _failed(self, failure: CommunicatorFailed) -> None:
        with self._counting:
            self._failure = self._failure or failure

    def _part(self) -> MpiWork:
        with self._counting:
            sound = self._failure is None and self._pending == 0
            self._failure = CommunicatorFailed(f"communicator {self.purpose!r} was closed")
        level = self._collectives
        self._verdict.copy_(torch.tensor([sound, level, -level]))
        here = numbers(self.mpi, self._verdict)
        request = self._farewell.Iallreduce(self.mpi.IN_PLACE, here, self.mpi.MIN)
        label = f"closing of {self.purpose!r}"
        work = MpiWork(label, math.inf, _nobody_counts, self._failed)
        self._progress.add(Flight(self.mpi, work, [Leg(request)], [self._verdict]))
        return work


def _nobody_counts() -> None:
    """Parting is no operation of the line's."""
