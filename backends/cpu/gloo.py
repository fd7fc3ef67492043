"""Gloo as a fabric: one process group a purpose, and the control plane beside them."""

from collections.abc import Sequence

from torch import distributed

from equipoise.backends.common.control_plane import STORE_TIMEOUT, StoreControlPlane
from equipoise.backends.common.tcp_store import StoreHost
from equipoise.backends.cpu.gloo_communicator import GLOO_CAPABILITIES, GlooCommunicator
from equipoise.hal.capabilities import Available, CommunicatorCapabilities, Probe, Unavailable
from equipoise.hal.communicator import Communicator, Rendezvous
from equipoise.hal.errors import Unsupported
from equipoise.hal.support.validation import check_members


class GlooFabric:
    """A rank's connection to all others."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._where = rendezvous
        self._control = StoreControlPlane(rendezvous)
        self._open: list[GlooCommunicator] = []
        self._purposes: set[str] = set()

    @property
    def control(self) -> StoreControlPlane:
        """The control plane."""
        return self._control

    def open(self, purpose: str, ranks: Sequence[int] | None = None) -> Communicator:
        """A process group of its own, among `ranks`.

        May be called again, by all members, after it has failed.
        """
        where = self._where
        members = tuple(range(where.size) if ranks is None else ranks)
        check_members(f"communicator {purpose!r}", where, members)
        if purpose in self._purposes:
            raise Unsupported(f"communicator {purpose!r} was opened before")
        self._open = [communicator for communicator in self._open if not communicator.closed]
        communicator = self._control.call_store(
            lambda: GlooCommunicator(
                self._control.store, purpose, members, where.rank, where.deadline
            ),
            where.deadline + STORE_TIMEOUT,
        )
        self._open.append(communicator)
        self._purposes.add(purpose)
        return communicator

    def close(self) -> None:
        """Close every communicator, then the control plane."""
        for communicator in self._open:
            communicator.close()
        self._open.clear()
        self._control.close()


class GlooBackend:
    """The entry point `equipoise.communicators: gloo`."""

    name = "gloo"

    @property
    def capabilities(self) -> CommunicatorCapabilities:
        """What gloo can do."""
        return GLOO_CAPABILITIES

    def probe(self) -> Probe:
        """Whether this build of torch has gloo."""
        if distributed.is_available() and distributed.is_gloo_available():
            return Available("torch.distributed with gloo")
        return Unavailable("this build of torch has no torch.distributed gloo")

    def device_bytes(self, communicators: int, links: int) -> int:
        """None: what it buffers is in the host's memory."""
        return 0

    def launcher_rendezvous(self) -> Rendezvous | None:
        """Gloo brings no launcher."""
        return None

    def host(self) -> StoreHost:
        """A store on this machine."""
        return StoreHost()

    def connect(self, rendezvous: Rendezvous) -> GlooFabric:
        """Meet the other ranks."""
        return GlooFabric(rendezvous)
