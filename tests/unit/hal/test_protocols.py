"""Clause R3: signatures equal the protocol's - names, order, kinds, defaults."""

import pytest

from equipoise.backends.ascend.accelerator import AscendAccelerator, AscendBackend
from equipoise.backends.common.control_plane import StoreControlPlane
from equipoise.backends.common.tcp_store import StoreHost
from equipoise.backends.cpu import BACKEND, GLOO
from equipoise.backends.cpu.accelerator import CpuAccelerator
from equipoise.backends.cpu.gloo import GlooFabric
from equipoise.backends.cpu.gloo_communicator import GlooCommunicator
from equipoise.backends.cpu.gloo_work import GlooWork
from equipoise.backends.cpu.kernels import CpuKernels
from equipoise.backends.cpu.lock import CpuStreamLock
from equipoise.backends.cpu.slots import CpuSlotStore
from equipoise.backends.cpu.stream import CpuEvent, CpuGraph, CpuStream
from equipoise.backends.mpi.backend import MpiBackend, MpiFabric
from equipoise.backends.mpi.communicator import MpiCommunicator
from equipoise.backends.mpi.work import MpiWork
from equipoise.hal import (
    accelerator,
    communicator,
    control_plane,
    kernels,
    lock,
    slots,
    stream,
    work,
)
from equipoise.hal.checked_communicator import CheckedCommunicator, CheckedWork
from equipoise.hal.conformance.properties.resources_signatures import (
    protocol_members,
    signature_differences,
)
from equipoise.hal.support.page_pool import PagePool, PoolPage
from equipoise.hal.support.slot_access import AttachedReader, SlotLease

PAIRS = [
    (accelerator.Backend, type(BACKEND)),
    (accelerator.Accelerator, CpuAccelerator),
    (stream.Stream, CpuStream),
    (stream.Event, CpuEvent),
    (accelerator.Graph, CpuGraph),
    (lock.StreamLock, CpuStreamLock),
    (accelerator.HostPool, PagePool),
    (accelerator.Page, PoolPage),
    (slots.SlotStore, CpuSlotStore),
    (slots.Lease, SlotLease),
    (slots.Reader, AttachedReader),
    (kernels.Kernels, CpuKernels),
    (communicator.CommunicatorBackend, type(GLOO)),
    (communicator.Communicator, GlooCommunicator),
    (communicator.Communicator, CheckedCommunicator),
    (communicator.Fabric, GlooFabric),
    (communicator.RendezvousHost, StoreHost),
    (control_plane.ControlPlane, StoreControlPlane),
    (work.Work, GlooWork),
    (communicator.CommunicatorBackend, MpiBackend),
    (communicator.Communicator, MpiCommunicator),
    (communicator.Fabric, MpiFabric),
    (work.Work, MpiWork),
    (work.Work, CheckedWork),
]
BESIDES = [
    (communicator.EstimatesCommunicatorMemory, type(GLOO)),
    (communicator.EstimatesCommunicatorMemory, MpiBackend),
    (accelerator.EstimatesRoutingMemory, AscendBackend),
    (accelerator.EstimatesRoutingMemory, AscendAccelerator),
]
"""What a backend may have and need not."""


@pytest.mark.parametrize(("protocol", "kind"), [*PAIRS, *BESIDES], ids=lambda t: t.__name__)
def test_class_members_match_protocol_signatures(protocol: type, kind: type) -> None:
    assert signature_differences(protocol, kind) == []


@pytest.mark.parametrize(("protocol", "kind"), PAIRS, ids=lambda t: t.__name__)
def test_class_has_no_public_names_beyond_protocol(protocol: type, kind: type) -> None:
    """Whoever programs against the CPU backend must not come to rely on more than the contract."""
    own = {"latest", "start_recording", "renew", "operation", "store", "bounded"}
    own |= {"call_store", "watch", "poll", "buffers", "close"}
    own |= {"expire", "complete", "fail"}
    own |= {"issue", "capture", "put", "closed", "forget_together"}
    own |= {"collect_retractable"}
    public = {name for name in vars(kind) if not name.startswith("_")}
    own |= set(
        protocol_members(communicator.EstimatesCommunicatorMemory)
    )  # a communicator's backend may have it besides
    assert public - set(protocol_members(protocol)) <= own
