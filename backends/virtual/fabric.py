"""A rank's connection to the others, and the backend that hands it out."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from equipoise.backends.virtual.communicator import VirtualCommunicator
from equipoise.backends.virtual.control_plane import VirtualControlPlane
from equipoise.hal.capabilities import Available, CommunicatorCapabilities, Probe
from equipoise.hal.communicator import Rendezvous, RendezvousHost
from equipoise.hal.errors import BackendUnavailable, Unsupported
from equipoise.hal.support.validation import check_rank

if TYPE_CHECKING:
    from equipoise.backends.virtual.backend import VirtualBackend
    from equipoise.backends.virtual.world import VirtualWorld


class VirtualFabric:
    """One rank's connection.

    Attributes:
        world: the world it is in.
        rank: whose it is.
        declared: what its communicators declare.
    """

    def __init__(
        self, world: "VirtualWorld", rank: int, declared: CommunicatorCapabilities
    ) -> None:
        self.world = world
        self.rank = rank
        self.declared = declared
        self._control = world.parts.control(world, rank)
        self._openings: dict[str, int] = {}
        self._open: list[VirtualCommunicator] = []

    @property
    def control(self) -> VirtualControlPlane:
        """The control plane."""
        return self._control

    def open(self, purpose: str, ranks: Sequence[int] | None = None) -> VirtualCommunicator:
        """A communicator of its own; does not wait for the others, its operations do."""
        members = tuple(range(self.world.size) if ranks is None else ranks)
        check_rank(f"communicator {purpose!r}", self.rank, members)
        opening = self._openings.get(purpose, 0)
        self._openings[purpose] = opening + 1
        communicator = self.world.parts.communicator(self, purpose, opening, members)
        self._open.append(communicator)
        return communicator

    def close(self) -> None:
        """Close every communicator, then the control plane."""
        for communicator in self._open:
            communicator.close()
        self._open.clear()
        self._control.close()


class VirtualCommunicatorBackend:
    """The entry point `equipoise.communicators: virtual`."""

    name = "virtual"

    def __init__(self, backend: "VirtualBackend") -> None:
        self._backend = backend

    @property
    def capabilities(self) -> CommunicatorCapabilities:
        """What the backend's network declares."""
        return self._backend.groups

    def probe(self) -> Probe:
        """Always there."""
        return Available("ranks that share one thread with the network between them")

    def launcher_rendezvous(self) -> None:
        """It brings no launcher."""

    def host(self) -> RendezvousHost:
        """There are no processes to meet."""
        raise Unsupported(
            "ranks of the virtual network are no processes: run the conformance suite"
        )

    def connect(self, rendezvous: Rendezvous) -> VirtualFabric:
        """A world of one rank; more of them only meet in a world."""
        if rendezvous.size != 1:
            raise BackendUnavailable(
                f"{rendezvous.size} ranks of the virtual network meet only inside one world: "
                "run the conformance suite"
            )
        return self._backend.alone().fabric(0)
