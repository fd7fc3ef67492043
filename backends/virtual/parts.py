"""The classes that a virtual device and network are made from: whoever breaks one, replaces it."""

from dataclasses import dataclass

from equipoise.backends.virtual.accelerator import VirtualAccelerator
from equipoise.backends.virtual.arena import Arena
from equipoise.backends.virtual.collective import Collective
from equipoise.backends.virtual.communicator import VirtualCommunicator
from equipoise.backends.virtual.control import Store, VirtualControlPlane
from equipoise.backends.virtual.device import Device
from equipoise.backends.virtual.event import Mark, VirtualEvent
from equipoise.backends.virtual.fabric import VirtualFabric
from equipoise.backends.virtual.graph import VirtualGraph
from equipoise.backends.virtual.kernels import VirtualKernels
from equipoise.backends.virtual.lock import VirtualStreamLock
from equipoise.backends.virtual.network import Group, Network
from equipoise.backends.virtual.operation import Operation
from equipoise.backends.virtual.outbox import Outbox
from equipoise.backends.virtual.pool import VirtualPool
from equipoise.backends.virtual.queue import Reports
from equipoise.backends.virtual.slots import VirtualSlotStore
from equipoise.backends.virtual.stream import VirtualStream
from equipoise.backends.virtual.transfer import Transfer
from equipoise.backends.virtual.work import VirtualWork
from equipoise.hal.hazards import Hazards
from equipoise.hal.leases import Leases
from equipoise.hal.readers import Readers


@dataclass(frozen=True, kw_only=True)
class Parts:
    """One class for each part; `dataclasses.replace(HEALTHY, stream=...)` changes one of them."""

    arena: type[Arena] = Arena
    device: type[Device] = Device
    accelerator: type[VirtualAccelerator] = VirtualAccelerator
    stream: type[VirtualStream] = VirtualStream
    mark: type[Mark] = Mark
    event: type[VirtualEvent] = VirtualEvent
    reports: type[Reports] = Reports
    lock: type[VirtualStreamLock] = VirtualStreamLock
    graph: type[VirtualGraph] = VirtualGraph
    slots: type[VirtualSlotStore] = VirtualSlotStore
    hazards: type[Hazards] = Hazards
    readers: type[Readers] = Readers
    leases: type[Leases] = Leases
    kernels: type[VirtualKernels] = VirtualKernels
    pool: type[VirtualPool] = VirtualPool
    network: type[Network] = Network
    group: type[Group] = Group
    transfer: type[Transfer] = Transfer
    collective: type[Collective] = Collective
    operation: type[Operation] = Operation
    outbox: type[Outbox] = Outbox
    work: type[VirtualWork] = VirtualWork
    communicator: type[VirtualCommunicator] = VirtualCommunicator
    fabric: type[VirtualFabric] = VirtualFabric
    store: type[Store] = Store
    control: type[VirtualControlPlane] = VirtualControlPlane


HEALTHY = Parts()
