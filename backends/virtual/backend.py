"""The virtual backend, and the classes that it is made from, so that a test can replace any of
them."""

from dataclasses import dataclass

import torch

from equipoise.backends.virtual.accelerator import VirtualAccelerator, VirtualPagePool
from equipoise.backends.virtual.arena import Arena
from equipoise.backends.virtual.communicator import VirtualCommunicator
from equipoise.backends.virtual.control_plane import VirtualControlPlane, VirtualStore
from equipoise.backends.virtual.device import VirtualDevice
from equipoise.backends.virtual.event import VirtualEvent, VirtualRecording
from equipoise.backends.virtual.fabric import VirtualFabric
from equipoise.backends.virtual.kernels import VirtualKernels
from equipoise.backends.virtual.lock import VirtualStreamLock
from equipoise.backends.virtual.network import Network, VirtualGroup
from equipoise.backends.virtual.operation import Outbox, VirtualOperation
from equipoise.backends.virtual.scheduling import HostNotifications
from equipoise.backends.virtual.slots import VirtualSlotStore
from equipoise.backends.virtual.stream import VirtualGraph, VirtualStream
from equipoise.backends.virtual.transfer import SUM_DTYPES, Collective, MessageTransfer
from equipoise.backends.virtual.work import VirtualWork
from equipoise.backends.virtual.world import EagerWorld, VirtualWorld
from equipoise.hal.capabilities import (
    Available,
    Capabilities,
    CommunicatorCapabilities,
    Probe,
    SlotFormat,
)
from equipoise.hal.errors import BackendUnavailable
from equipoise.hal.stream import Role
from equipoise.hal.support.slot_access import HazardTracker, LeaseTable, ReaderRegistry


@dataclass(frozen=True, kw_only=True)
class VirtualParts:
    """One class for each part; `dataclasses.replace(HEALTHY, stream=...)` changes one of them."""

    arena: type[Arena] = Arena
    device: type[VirtualDevice] = VirtualDevice
    accelerator: type[VirtualAccelerator] = VirtualAccelerator
    stream: type[VirtualStream] = VirtualStream
    mark: type[VirtualRecording] = VirtualRecording
    event: type[VirtualEvent] = VirtualEvent
    reports: type[HostNotifications] = HostNotifications
    lock: type[VirtualStreamLock] = VirtualStreamLock
    graph: type[VirtualGraph] = VirtualGraph
    slots: type[VirtualSlotStore] = VirtualSlotStore
    hazards: type[HazardTracker] = HazardTracker
    readers: type[ReaderRegistry] = ReaderRegistry
    leases: type[LeaseTable] = LeaseTable
    kernels: type[VirtualKernels] = VirtualKernels
    pool: type[VirtualPagePool] = VirtualPagePool
    network: type[Network] = Network
    group: type[VirtualGroup] = VirtualGroup
    transfer: type[MessageTransfer] = MessageTransfer
    collective: type[Collective] = Collective
    operation: type[VirtualOperation] = VirtualOperation
    outbox: type[Outbox] = Outbox
    work: type[VirtualWork] = VirtualWork
    communicator: type[VirtualCommunicator] = VirtualCommunicator
    fabric: type[VirtualFabric] = VirtualFabric
    store: type[VirtualStore] = VirtualStore
    control: type[VirtualControlPlane] = VirtualControlPlane


HEALTHY = VirtualParts()


ALL_CAPABILITIES = Capabilities(
    streams=len(Role),
    stream_lock=True,
    copy_independent_of_launch=True,
    graph_capture=True,
    kernel_capture=True,
    pinned_memory=True,
    slot_formats=frozenset(SlotFormat),
)
"""All that an accelerator can declare."""

ALL_COMMUNICATOR_CAPABILITIES = CommunicatorCapabilities(
    stream_ordered=True,
    independent_groups=True,
    abort=True,
    rebuild=True,
    shared_devices=True,
    dtypes=frozenset(
        {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}
        | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
        | {torch.float8_e4m3fn, torch.float8_e5m2}
    ),
    reductions=frozenset(SUM_DTYPES),
)
"""All that a communicator can declare."""


class VirtualBackend:
    """The entry point `equipoise.accelerators: virtual`.

    Args:
        parts: what its worlds are made from.
        capabilities: what its devices declare.
        groups: what its communicators declare.
    """

    name = "virtual"
    communicator = "virtual"

    def __init__(
        self,
        parts: VirtualParts = HEALTHY,
        capabilities: Capabilities = ALL_CAPABILITIES,
        groups: CommunicatorCapabilities = ALL_COMMUNICATOR_CAPABILITIES,
    ) -> None:
        self._parts = parts
        self._capabilities = capabilities
        self._groups = groups

    @property
    def capabilities(self) -> Capabilities:
        """As it was made."""
        return self._capabilities

    @property
    def parts(self) -> VirtualParts:
        """What its worlds are made from."""
        return self._parts

    @property
    def groups(self) -> CommunicatorCapabilities:
        """What its communicators declare."""
        return self._groups

    def probe(self) -> Probe:
        """Always there."""
        return Available("one thread, no clock; every interleaving is chosen by a schedule")

    def devices(self) -> int:
        """One; a world has one for each of its ranks."""
        return 1

    def open(self, index: int) -> VirtualAccelerator:
        """The device of a world of one rank, in which everything moves at once."""
        if index != 0:
            raise BackendUnavailable(f"the virtual backend opens device 0 only, not {index}")
        return self.alone().accelerator(0)

    def alone(self) -> VirtualWorld:
        """A world of one rank, in which everything moves at once."""
        return EagerWorld(1, b"", self._parts, self._capabilities, self._groups)

    def world(self, size: int, schedule: bytes) -> VirtualWorld:
        """Ranks on a schedule."""
        return VirtualWorld(size, schedule, self._parts, self._capabilities, self._groups)
