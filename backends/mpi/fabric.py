"""MPI as a fabric: communicators by purpose, one thread that drives them, the control plane."""

import time
from collections.abc import Sequence
from zlib import crc32

from equipoise.backends.cpu.control import ANSWER, StoreControlPlane
from equipoise.backends.mpi.communicator import MpiCommunicator
from equipoise.backends.mpi.line import Line
from equipoise.backends.mpi.progress import Progress
from equipoise.backends.mpi.world import World
from equipoise.hal.communicator import Communicator, Rendezvous
from equipoise.hal.errors import BallotIncomplete, CommunicatorFailed, Unsupported
from equipoise.hal.operands import check_members

TAGS = 1 << 15
"""Tags that every MPI has."""


class MpiFabric:
    """A rank's connection to all others."""

    def __init__(self, world: World, rendezvous: Rendezvous) -> None:
        self._world = world
        self._where = rendezvous
        self._control = StoreControlPlane(rendezvous)
        self._progress = Progress()
        self._lines: list[Line] = []
        self._purposes: set[str] = set()
        world.guests.append(self)

    @property
    def control(self) -> StoreControlPlane:
        """The control plane."""
        return self._control

    def open(self, purpose: str, ranks: Sequence[int] | None = None) -> Communicator:
        """MPI communicators of its own, among `ranks`.

        May be called again, by all members, after a member has not come in time.
        """
        members = tuple(range(self._where.size) if ranks is None else ranks)
        what = f"communicator {purpose!r}"
        check_members(what, self._where, members)
        if purpose in self._purposes:
            raise Unsupported(f"{what} was opened before")
        self._purposes.add(purpose)
        self._lines = [line for line in self._lines if not line.release(0.0)]
        self._meet(purpose, members)
        try:
            tag = crc32(f"{purpose}/{members}".encode()) % TAGS
            traffic, farewell = self._world.form(members, tag, self._where.deadline + ANSWER)
        except TimeoutError as error:
            raise CommunicatorFailed(f"{what}: MPI did not make it in time") from error
        mpi, deadline = self._world.mpi, self._where.deadline
        line = Line(mpi, traffic, farewell, purpose, deadline, self._progress)
        self._lines.append(line)
        return MpiCommunicator(line)

    def close(self) -> None:
        """Close every communicator, then the control plane; bounded by the deadline."""
        if self not in self._world.guests:
            return
        self._world.guests.remove(self)
        expiry = time.monotonic() + self._where.deadline
        for line in self._lines:
            line.close()
        for line in self._lines:
            line.release(max(expiry - time.monotonic(), 0.0))
        self._world.stranded.extend(self._progress.stop(self._where.deadline))
        self._control.close()

    def _meet(self, purpose: str, members: tuple[int, ...]) -> None:
        """Wait until every member has come: MPI itself would wait for them for ever."""
        question, deadline = f"open/{purpose}/{members}", self._where.deadline
        self._control.cast(question, b"")
        try:
            self._control.collect_retractable(question, deadline, members)
        except BallotIncomplete as error:
            # Who comes late must not take it for the ballot of a rank that waits. MPI has not been
            # asked yet: once it has, there is no second attempt.
            self._control.forget(question, (self._where.rank,))
            self._purposes.discard(purpose)
            raise CommunicatorFailed(
                f"the ranks did not all meet within {deadline:g} s: "
                f"rank(s) {error.missing} did not open {purpose!r}"
            ) from error
        self._control.forget_together(question, members)
