"""The entry point `equipoise.communicators: mpi`."""

import json
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from platform import node

from equipoise.backends.cpu.store import StoreHost
from equipoise.backends.mpi.communicator import MPI_CAPABILITIES
from equipoise.backends.mpi.fabric import MpiFabric
from equipoise.backends.mpi.world import REMEDY, enter, launched
from equipoise.hal.capabilities import Available, CommunicatorCapabilities, Probe, Unavailable
from equipoise.hal.communicator import Rendezvous, RendezvousHost
from equipoise.hal.errors import ControlLost, Unsupported, UsageError

DEADLINE = 20.0
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
            return Unavailable(f"mpi4py is not installed: {REMEDY}")
        return Available(f"mpi4py {_version()}")

    def device_bytes(self, communicators: int, links: int) -> int:
        """None: what it buffers is in the host's memory."""
        return 0

    def joined(self) -> Rendezvous | None:
        """Where mpiexec put this process; rank 0 holds a new store each time, to its end.

        Raises:
            BackendUnavailable: mpiexec started this process, but there is no MPI for Python.
            ControlLost: the other ranks do not come, or rank 0 cannot hold a store.
            Unsupported: the ranks are on several machines.
        """
        if not launched():
            return None
        world = enter(DEADLINE)
        note = world.share(self._note() if world.rank == 0 else "", DEADLINE)
        machine, host, port, error = json.loads(note)
        if error:
            raise ControlLost(error)
        if machine != node():
            raise Unsupported(f"the ranks must be on one machine, got {machine} and {node()}")
        return Rendezvous(rank=world.rank, size=world.size, host=host, port=port, deadline=DEADLINE)

    def host(self) -> RendezvousHost:
        """A further store, on this process: for groups of the first few ranks (see `connect`)."""
        return StoreHost()

    def connect(self, rendezvous: Rendezvous) -> MpiFabric:
        """Meet the other ranks, which are the first `rendezvous.size` of those that MPI knows.

        Raises as `joined`, and `UsageError` if MPI counts otherwise.
        """
        world = enter(rendezvous.deadline)
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
        except ControlLost as error:
            return json.dumps([node(), "", 0, str(error)])
        return json.dumps([node(), *self._hosts[-1].address, ""])


def _version() -> str:
    try:
        return version("mpi4py")
    except PackageNotFoundError:  # importable all the same
        return "of unknown version"
