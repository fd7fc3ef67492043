"""The classes that a virtual device and network are made from: whoever breaks one, replaces it."""

from dataclasses import dataclass

from equipoise.backends.virtual.accelerator import VirtualAccelerator
from equipoise.backends.virtual.arena import Arena
from equipoise.backends.virtual.device import Device
from equipoise.backends.virtual.event import Mark, VirtualEvent
from equipoise.backends.virtual.graph import VirtualGraph
from equipoise.backends.virtual.kernels import VirtualKernels
from equipoise.backends.virtual.lock import VirtualStreamLock
from equipoise.backends.virtual.pool import VirtualPool
from equipoise.backends.virtual.slots import VirtualSlotStore
from equipoise.backends.virtual.stream import VirtualStream
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
    lock: type[VirtualStreamLock] = VirtualStreamLock
    graph: type[VirtualGraph] = VirtualGraph
    slots: type[VirtualSlotStore] = VirtualSlotStore
    hazards: type[Hazards] = Hazards
    readers: type[Readers] = Readers
    leases: type[Leases] = Leases
    kernels: type[VirtualKernels] = VirtualKernels
    pool: type[VirtualPool] = VirtualPool


HEALTHY = Parts()
