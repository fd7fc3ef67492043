"""HCCL as a fabric: communicators by purpose, what watches them, and the control plane."""

from collections.abc import Sequence

from equipoise.backends.ascend import native
from equipoise.backends.ascend.building import Builder
from equipoise.backends.ascend.communicator import HcclCommunicator, hccl_capabilities
from equipoise.backends.ascend.incarnation import Setting
from equipoise.backends.ascend.ledger import estimate
from equipoise.backends.ascend.parting import Partings
from equipoise.backends.ascend.settings import obstacle
from equipoise.backends.ascend.watchdog import Watchdog
from equipoise.backends.cpu.control import StoreControlPlane
from equipoise.backends.cpu.store import StoreHost
from equipoise.hal.capabilities import CommunicatorCapabilities, Probe, Unavailable
from equipoise.hal.communicator import Communicator, Rendezvous
from equipoise.hal.errors import BackendUnavailable, CommunicatorFailed, Unsupported
from equipoise.hal.operands import check_members

FAREWELL = 2.0
"""Seconds that channels get to be given back when a fabric closes; less than that may do."""
BEREFT = 0.1
"""The same when a rank was lost: what needs it will never be idle."""


class HcclFabric:
    """A rank's connection to all others."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._where = rendezvous
        self._control = StoreControlPlane(rendezvous)
        self._builder = Builder(self._control)
        self._partings = Partings(self._control)
        self._watchdog = Watchdog(self._partings.tick)
        self._open: dict[str, HcclCommunicator] = {}
        self._closed = False

    @property
    def control(self) -> StoreControlPlane:
        """The control plane."""
        return self._control

    def open(self, purpose: str, ranks: Sequence[int] | None = None) -> Communicator:
        """Channels of its own, among `ranks`, on the device that this process has opened."""
        where = self._where
        members = tuple(range(where.size) if ranks is None else ranks)
        check_members(f"communicator {purpose!r}", where, members)
        if purpose in self._open:
            raise Unsupported(f"communicator {purpose!r} was opened before")
        self._partings.tick()
        setting = Setting(
            purpose=purpose,
            rank=where.rank,
            deadline=where.deadline,
            index=_device(where.rank),
            builder=self._builder,
            watchdog=self._watchdog,
            partings=self._partings,
        )
        try:
            self._open[purpose] = HcclCommunicator(setting, members)
        except CommunicatorFailed as error:
            raise CommunicatorFailed(f"communicator {purpose!r} was not opened: {error}") from error
        return self._open[purpose]

    def close(self) -> None:
        """Close every communicator, then the control plane; bounded by the deadline."""
        if self._closed:
            return
        self._closed = True
        for communicator in self._open.values():
            communicator.close()
        self._builder.give_up()
        self._watchdog.stop(self._where.deadline)
        self._partings.finish(self._farewell)
        self._control.close()

    def _farewell(self) -> float:
        lost = self._control.lost(0.0) is not None
        return BEREFT if lost else min(FAREWELL, self._where.deadline)


class HcclBackend:
    """The entry point `equipoise.communicators: hccl`."""

    name = "hccl"

    @property
    def capabilities(self) -> CommunicatorCapabilities:
        """What HCCL can do."""
        return hccl_capabilities()

    def probe(self) -> Probe:
        """Whether torch_npu is here and sees a device, and is not set to block the host."""
        return Unavailable(why) if (why := obstacle()) else native.probe()

    def device_bytes(self, communicators: int, links: int) -> int:
        """With today's settings; HCCL itself says it nowhere."""
        return estimate(communicators, links)

    def joined(self) -> Rendezvous | None:
        """HCCL brings no launcher."""
        return None

    def host(self) -> StoreHost:
        """A store on this machine."""
        return StoreHost()

    def connect(self, rendezvous: Rendezvous) -> HcclFabric:
        """Meet the other ranks. Raises `BackendUnavailable` where that cannot be."""
        answer = self.probe()
        if isinstance(answer, Unavailable):
            raise BackendUnavailable(answer.reason)
        return HcclFabric(rendezvous)


def _device(rank: int) -> int:
    """The device that this process has opened, else the one that the rank's number gives it."""
    opened = native.chosen()
    return rank % native.devices() if opened is None else opened
