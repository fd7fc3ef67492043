"""The MPI backend: the entry point `equipoise.communicators: mpi`, and its fabric."""

import json
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from platform import node
from zlib import crc32

from equipoise.backends.common.control_plane import STORE_TIMEOUT, StoreControlPlane
from equipoise.backends.common.tcp_store import StoreHost
from equipoise.backends.mpi.communicator import MPI_CAPABILITIES, MpiCommQueue, MpiCommunicator
from equipoise.backends.mpi.progress import ProgressThread
from equipoise.backends.mpi.world import INSTALL_HINT, MpiWorld, join_world, started_by_mpiexec
from equipoise.hal.capabilities import Available, CommunicatorCapabilities, Probe, Unavailable
from equipoise.hal.communicator import Communicator, Rendezvous, RendezvousHost
from equipoise.hal.errors import (
    BallotIncomplete,
    CommunicatorFailed,
    ControlPlaneLost,
    Unsupported,
    UsageError,
)
from equipoise.hal.support.validation import check_members

TAGS = 1 << 15
"""Tags that every MPI has."""


class MpiFabric:
    """One rank's connection to all others, over MPI."""

    def __init__(self, world: MpiWorld, rendezvous: Rendezvous) -> None:
        self._world = world
        self._where = rendezvous
        self._control = StoreControlPlane(rendezvous)
        self._progress = ProgressThread()
        self._queues: list[MpiCommQueue] = []
        self._purposes: set[str] = set()
        world.open_fabrics.append(self)

    @property
    def control(self) -> StoreControlPlane:
        """The control plane."""
        return self._control

    def open(self, purpose: str, ranks: Sequence[int] | None = None) -> Communicator:
        """MPI communicators of its own, among `ranks`.

        May be called again, by all members, after a member has not come in time.
        """
        members = tuple(range(self._where.size) if ranks is None else ranks)
        label = f"communicator {purpose!r}"
        check_members(label, self._where, members)
        if purpose in self._purposes:
            raise Unsupported(f"{label} was opened before")
        self._purposes.add(purpose)
        self._queues = [queue for queue in self._queues if not queue.release(0.0)]
        self._meet(purpose, members)
        try:
            tag = crc32(f"{purpose}/{members}".encode()) % TAGS
            traffic, closing_comm = self._world.make_communicators(
                members, tag, self._where.deadline + STORE_TIMEOUT
            )
        except TimeoutError as error:
            raise CommunicatorFailed(f"{label}: MPI did not make it in time") from error
        mpi, deadline = self._world.mpi, self._where.deadline
        queue = MpiCommQueue(mpi, traffic, closing_comm, purpose, deadline, self._progress)
        self._queues.append(queue)
        return MpiCommunicator(queue)

    def close(self) -> None:
        """Close every communicator, then the control plane; bounded by the deadline."""
        if self not in self._world.open_fabrics:
            return
        self._world.open_fabrics.remove(self)
        expiry = time.monotonic() + self._where.deadline
        for queue in self._queues:
            queue.close()
        for queue in self._queues:
            queue.release(max(expiry - time.monotonic(), 0.0))
        self._world.never_released.extend(self._progress.stop(self._where.deadline))
        self._control.close()

    def _meet(self, purpose: str, members: tuple[int, ...]) -> None:
        """Wait until every member is about to call MPI, which would wait for them for ever."""
        question, deadline = f"open/{purpose}/{members}", self._where.deadline
        self._control.cast(question, b"")
        try:
            self._control.collect_retractable(question, deadline, members)
        except BallotIncomplete as error:
            # Withdraw the ballot: a late member must not take it for that of a rank that waits. MPI
            # was not called yet; after that there is no second attempt.
            self._control.forget(question, (self._where.rank,))
            self._purposes.discard(purpose)
            raise CommunicatorFailed(
                f"the ranks did not all meet within {deadline:g} s: "
                f"rank(s) {error.missing} did not open {purpose!r}"
            ) from error
        self._control.forget_together(question, members)


DEFAULT_DEADLINE = 20.0
"""Seconds that any wait may last, unless the caller replaces it in the rendezvous."""


class MpiBackend:
    """Collectives over MPI; ranks are started by mpiexec."""

    name = "mpi"

    def __init__(self) -> None:
        self._hosts: list[StoreHost] = []

    @property
    def capabilities(self) -> CommunicatorCapabilities:
        """What MPI can do."""
        return MPI_CAPABILITIES

    def probe(self) -> Probe:
        """Whether mpi4py is installed; it is not imported, for that might initialise MPI."""
        if find_spec("mpi4py") is None:
            return Unavailable(f"mpi4py is not installed: {INSTALL_HINT}")
        return Available(f"mpi4py {_version()}")

    def device_bytes(self, communicators: int, links: int) -> int:
        """None: what it buffers is in the host's memory."""
        return 0

    def launcher_rendezvous(self) -> Rendezvous | None:
        """Where mpiexec put this process; rank 0 holds a new store each time, to its end.

        Raises:
            BackendUnavailable: mpiexec started this process, but there is no MPI for Python.
            ControlPlaneLost: the other ranks do not come, or rank 0 cannot hold a store.
            Unsupported: the ranks are on several machines.
        """
        if not started_by_mpiexec():
            return None
        world = join_world(DEFAULT_DEADLINE)
        note = world.broadcast_note(self._note() if world.rank == 0 else "", DEFAULT_DEADLINE)
        machine, host, port, error = json.loads(note)
        if error:
            raise ControlPlaneLost(error)
        if machine != node():
            raise Unsupported(f"the ranks must be on one machine, got {machine} and {node()}")
        return Rendezvous(
            rank=world.rank, size=world.size, host=host, port=port, deadline=DEFAULT_DEADLINE
        )

    def host(self) -> RendezvousHost:
        """A further store, on this process: for groups of the first few ranks (see `connect`)."""
        return StoreHost()

    def connect(self, rendezvous: Rendezvous) -> MpiFabric:
        """Meet the other ranks, which are the first `rendezvous.size` of those that MPI knows.

        Raises as `joined`, and `UsageError` if MPI counts otherwise.
        """
        world = join_world(rendezvous.deadline)
        if rendezvous.rank != world.rank or rendezvous.size > world.size:
            raise UsageError(
                f"mpiexec made this rank {world.rank} of {world.size}, "
                f"not {rendezvous.rank} of {rendezvous.size}"
            )
        return MpiFabric(world, rendezvous)

    def _note(self) -> str:
        """A new store: this machine, its host and port, and why there is none."""
        try:
            self._hosts.append(StoreHost())
        except ControlPlaneLost as error:
            return json.dumps([node(), "", 0, str(error)])
        return json.dumps([node(), *self._hosts[-1].address, ""])


def _version() -> str:
    try:
        return version("mpi4py")
    except PackageNotFoundError:  # importable all the same
        return "of unknown version"
