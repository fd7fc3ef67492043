"""The hardware contract: protocols, capabilities, errors.

Clauses: `docs/contract.md`. Every public name can be imported from here. Modules, and torch with
them, are imported at the first use, so that a command that only prints its help starts fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.hal.accelerator import Accelerator as Accelerator
    from equipoise.hal.accelerator import Backend as Backend
    from equipoise.hal.accelerator import EstimatesRoutingMemory as EstimatesRoutingMemory
    from equipoise.hal.accelerator import Graph as Graph
    from equipoise.hal.accelerator import HostPool as HostPool
    from equipoise.hal.accelerator import Memory as Memory
    from equipoise.hal.accelerator import Page as Page
    from equipoise.hal.accelerator import Topology as Topology
    from equipoise.hal.capabilities import Available as Available
    from equipoise.hal.capabilities import Capabilities as Capabilities
    from equipoise.hal.capabilities import CommunicatorCapabilities as CommunicatorCapabilities
    from equipoise.hal.capabilities import Operation as Operation
    from equipoise.hal.capabilities import SlotFormat as SlotFormat
    from equipoise.hal.capabilities import Unavailable as Unavailable
    from equipoise.hal.communicator import Communicator as Communicator
    from equipoise.hal.communicator import CommunicatorBackend as CommunicatorBackend
    from equipoise.hal.communicator import (
        EstimatesCommunicatorMemory as EstimatesCommunicatorMemory,
    )
    from equipoise.hal.communicator import Exchange as Exchange
    from equipoise.hal.communicator import Fabric as Fabric
    from equipoise.hal.communicator import PeerBuffer as PeerBuffer
    from equipoise.hal.communicator import Rendezvous as Rendezvous
    from equipoise.hal.communicator import RendezvousHost as RendezvousHost
    from equipoise.hal.control_plane import ControlPlane as ControlPlane
    from equipoise.hal.kernels import Kernels as Kernels
    from equipoise.hal.kernels import Salt as Salt
    from equipoise.hal.kernels import Tables as Tables
    from equipoise.hal.kernels import TableUpdate as TableUpdate
    from equipoise.hal.lock import StreamLock as StreamLock
    from equipoise.hal.slots import Lease as Lease
    from equipoise.hal.slots import Reader as Reader
    from equipoise.hal.slots import Segment as Segment
    from equipoise.hal.slots import SegmentType as SegmentType
    from equipoise.hal.slots import SlotLayout as SlotLayout
    from equipoise.hal.slots import SlotStore as SlotStore
    from equipoise.hal.stream import Event as Event
    from equipoise.hal.stream import Role as Role
    from equipoise.hal.stream import Stream as Stream
    from equipoise.hal.work import Work as Work

HOMES = {
    "accelerator": (
        "Accelerator",
        "Backend",
        "EstimatesRoutingMemory",
        "Graph",
        "HostPool",
        "Memory",
        "Page",
        "Topology",
    ),
    "capabilities": (
        "Available",
        "Capabilities",
        "CommunicatorCapabilities",
        "Operation",
        "SlotFormat",
        "Unavailable",
    ),
    "communicator": (
        "Communicator",
        "CommunicatorBackend",
        "EstimatesCommunicatorMemory",
        "Exchange",
        "Fabric",
        "PeerBuffer",
        "Rendezvous",
        "RendezvousHost",
    ),
    "control_plane": ("ControlPlane",),
    "kernels": ("Kernels", "Salt", "TableUpdate", "Tables"),
    "lock": ("StreamLock",),
    "slots": ("Lease", "Reader", "Segment", "SegmentType", "SlotLayout", "SlotStore"),
    "stream": ("Event", "Role", "Stream"),
    "work": ("Work",),
}
"""Exported names by module; errors are in `equipoise.hal.errors`."""

_MODULE = {name: module for module, names in HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import an exported name from its module."""
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    """Names that can be imported."""
    return sorted([*globals(), *_MODULE])
