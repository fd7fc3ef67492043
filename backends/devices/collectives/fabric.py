"""The fabric over a library: opens communicators, and owns their watchdog and the control plane."""

from collections.abc import Sequence

from equipoise.backends.common.control_plane import StoreControlPlane
from equipoise.backends.common.tcp_store import StoreHost
from equipoise.backends.devices.collectives.ccl import Ccl
from equipoise.backends.devices.collectives.comm_init import CommBuilder
from equipoise.backends.devices.collectives.comm_set import CommContext
from equipoise.backends.devices.collectives.communicator import DeviceCommunicator
from equipoise.backends.devices.collectives.teardown import TeardownQueue
from equipoise.backends.devices.collectives.watchdog import Watchdog
from equipoise.backends.devices.runtime import Device
from equipoise.hal.capabilities import CommunicatorCapabilities, Probe, Unavailable
from equipoise.hal.communicator import Communicator, Rendezvous
from equipoise.hal.errors import BackendUnavailable, CommunicatorFailed, Unsupported
from equipoise.hal.support.validation import check_members

CLOSE_TIMEOUT = 2.0
"""Maximum seconds that a closing fabric waits until all members have released their communicators.
The other ranks close at about the same time; what is still busy then is kept (`teardown`)."""
CLOSE_TIMEOUT_AFTER_LOSS = 0.1
"""The same after a rank was lost: what needs that rank will never be idle, so a wait gains
nothing."""


class DeviceFabric:
    """One rank's connection to all others, over a library."""

    def __init__(self, library: Ccl, rendezvous: Rendezvous) -> None:
        self._library = library
        self._where = rendezvous
        self._control = StoreControlPlane(rendezvous)
        self._builder = CommBuilder(library, self._control)
        self._teardowns = TeardownQueue(library.name, self._control)
        self._watchdog = Watchdog(library.name, self._teardowns.tick)
        self._open: list[DeviceCommunicator] = []
        self._purposes: set[str] = set()
        self._closed = False

    @property
    def control(self) -> StoreControlPlane:
        """The control plane."""
        return self._control

    def open(self, purpose: str, ranks: Sequence[int] | None = None) -> Communicator:
        """A new communicator among `ranks`, on the device that this process has opened.

        After a failure all members may call it again.
        """
        where = self._where
        members = tuple(range(where.size) if ranks is None else ranks)
        check_members(f"communicator {purpose!r}", where, members)
        if purpose in self._purposes:
            raise Unsupported(f"communicator {purpose!r} was opened before")
        self._teardowns.tick()
        self._open = [communicator for communicator in self._open if not communicator.closed]
        context = CommContext(
            purpose=purpose,
            rank=where.rank,
            deadline=where.deadline,
            ccl=self._library,
            device=Device(self._library.runtime, self._library.device(where.rank)),
            builder=self._builder,
            watchdog=self._watchdog,
            teardowns=self._teardowns,
        )
        try:
            communicator = DeviceCommunicator(context, members)
        except CommunicatorFailed as error:
            raise CommunicatorFailed(f"communicator {purpose!r} was not opened: {error}") from error
        self._open.append(communicator)
        self._purposes.add(purpose)
        return communicator

    def close(self) -> None:
        """Close every communicator, then the control plane; bounded by the deadline."""
        if self._closed:
            return
        self._closed = True
        # In this order: no new operations; no communicator that is still being made; the watchdog,
        # which uses the teardowns; then the teardowns, which use the control plane.
        for communicator in self._open:
            communicator.close()
        self._builder.give_up()
        self._watchdog.stop(self._where.deadline)
        self._teardowns.finish(self._close_timeout)
        self._control.close()

    def _close_timeout(self) -> float:
        has_loss = self._control.lost_rank(0.0) is not None
        return CLOSE_TIMEOUT_AFTER_LOSS if has_loss else min(CLOSE_TIMEOUT, self._where.deadline)


class DeviceCommunicatorBackend:
    """The communicator backend of a library, which an entry point names."""

    def __init__(self, library: Ccl) -> None:
        self._library = library

    @property
    def name(self) -> str:
        """The library's name."""
        return self._library.name

    @property
    def capabilities(self) -> CommunicatorCapabilities:
        """What the library can do."""
        return self._library.capabilities

    def probe(self) -> Probe:
        """Whether the library is installed, sees a device, and is not configured to block the
        host."""
        return self._library.probe()

    def device_bytes(self, communicators: int, links: int) -> int:
        """An estimate with the current settings; libraries do not report it in advance."""
        estimate = self._library.estimate_bytes
        return communicators * estimate(link=False) + links * estimate(link=True)

    def launcher_rendezvous(self) -> Rendezvous | None:
        """None: the library has no launcher."""
        return None

    def host(self) -> StoreHost:
        """A store on this machine."""
        return StoreHost()

    def connect(self, rendezvous: Rendezvous) -> DeviceFabric:
        """Meet the other ranks. Raises `BackendUnavailable` where that cannot be."""
        answer = self.probe()
        if isinstance(answer, Unavailable):
            raise BackendUnavailable(answer.reason)
        return DeviceFabric(self._library, rendezvous)
