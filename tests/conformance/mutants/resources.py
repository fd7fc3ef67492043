"""Mutants of family *resources*."""

import dataclasses
from collections.abc import Callable
from importlib import import_module

from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import device_with, network_with
from torch import Tensor

from equipoise.backends.virtual.accelerator import VirtualAccelerator
from equipoise.backends.virtual.backend import ALL_CAPABILITIES, VirtualBackend
from equipoise.backends.virtual.device import VirtualDevice
from equipoise.backends.virtual.event import VirtualEvent
from equipoise.backends.virtual.lock import VirtualStreamLock
from equipoise.backends.virtual.slots import VirtualSlotStore
from equipoise.backends.virtual.stream import VirtualGraph, VirtualStream
from equipoise.backends.virtual.work import VirtualWork
from equipoise.backends.virtual.world import VirtualWorld
from equipoise.hal.capabilities import Capabilities, Probe
from equipoise.hal.conformance.executors.controlled import ControlledSubject
from equipoise.hal.conformance.subject import Subject
from equipoise.hal.slots import SlotLayout
from equipoise.hal.stream import Role

LARGEST = 1 << 10


class GuessingBackend(VirtualBackend):
    """Imports a vendor's package to find out whether it is there."""

    def probe(self) -> Probe:
        import_module("no_such_vendor")
        return super().probe()


class MiscountingBackend(VirtualBackend):
    """Counts what it has opened, and not what it could open."""

    def devices(self) -> int:
        return 0


class WaveringBackend(VirtualBackend):
    """Declares less once a device was opened."""

    _is_open = False

    @property
    def capabilities(self) -> Capabilities:
        own_capabilities = super().capabilities
        return dataclasses.replace(own_capabilities, pinned_memory=not self._is_open)

    def world(self, size: int, schedule: bytes) -> VirtualWorld:
        self._is_open = True
        return super().world(size, schedule)


class PooledStreams(VirtualAccelerator):
    """A pool of three streams serves four roles."""

    def stream(self, role: Role) -> VirtualStream:
        return super().stream(Role.COMM if role is Role.AUX else role)


class AnythingAdopted(VirtualAccelerator):
    """Whatever is to be adopted is taken for the compute stream."""

    def adopt(self, native_stream: object) -> VirtualStream:
        return self.stream(Role.COMPUTE)


class OnePinnedBlock(VirtualAccelerator):
    """All pinned memory begins at one address."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__(device)
        self._block = device.arena.empty(LARGEST)

    def pinned(self, nbytes: int) -> Tensor:
        return self._block[:nbytes]


class EventPool(VirtualAccelerator):
    """Every event is kept, to be used again, and none is."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__(device)
        self._events: list[VirtualEvent] = []

    def event(self) -> VirtualEvent:
        self._events.append(super().event())
        return self._events[-1]


class StoreRegistry(VirtualAccelerator):
    """Every store stays registered with its device."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__(device)
        self._stores: list[VirtualSlotStore] = []

    def slot_store(self, layout: SlotLayout) -> VirtualSlotStore:
        self._stores.append(super().slot_store(layout))
        return self._stores[-1]


class SilentGraphs(VirtualAccelerator):
    """Gives out graphs that were not declared."""

    def graph(self) -> VirtualGraph:
        return self._device.parts.graph(self._device)


class NullLocks(VirtualAccelerator):
    """What is not declared is a null pointer."""

    def stream_lock(self, deadline: float) -> VirtualStreamLock:
        raise AttributeError("'NoneType' object has no attribute 'stream_lock'")


class RenamedParameter(VirtualAccelerator):
    """One parameter has another name than in the protocol."""

    def pinned(self, size: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().pinned(size)


class ForeverWork(VirtualWork):
    """Waits for ever without a timeout."""

    def result(self, timeout: float = float("inf")) -> None:
        super().result(timeout)


def _backend(kind: type[VirtualBackend]) -> Callable[[], Subject]:
    return lambda: ControlledSubject(kind())


def _waking() -> Subject:
    module = import_module("conformance.mutants.thread_on_import")
    return ControlledSubject(module.WakingBackend())


PROBE = "probe-opens-nothing-and-capabilities-are-frozen"
HANDED = "streams-are-cached-by-role-and-pinned-memory-is-not-shared"
UNDECLARED_CAPABILITIES = "undeclared-capabilities-raise-unsupported"
SIGNED = "every-object-has-the-signatures-of-its-protocol"
GIVEN_BACK = "dropped-objects-release-their-resources"
MUTANTS = (
    Mutant(
        name="probing-raises-where-the-vendor-is-absent",
        clause="B1",
        broken="Probing tries an import and lets its error out (DeepSpeed tries eight).",
        property=PROBE,
        subject=_backend(GuessingBackend),
    ),
    Mutant(
        name="no-device-though-available",
        clause="B1",
        broken="A count of devices contradicts the probe, so that ranks find nothing to open.",
        property=PROBE,
        subject=_backend(MiscountingBackend),
    ),
    Mutant(
        name="capabilities-change-when-a-device-is-opened",
        clause="B2",
        broken="What was planned by before opening is not true any more.",
        property=PROBE,
        subject=_backend(WaveringBackend),
    ),
    Mutant(
        name="two-roles-get-one-stream",
        clause="B4",
        broken="The stream of one role says that it is another role's.",
        property=HANDED,
        subject=device_with(accelerator=PooledStreams),
        # Two roles that share a stream do not run side by side.
        also=(
            "other-streams-run-while-one-waits-for-a-signal",
            "declared-streams-run-side-by-side",
        ),
    ),
    Mutant(
        name="anything-is-adopted",
        clause="B5",
        broken="A foreign stream is replaced by one of the device's, which nothing of it is on.",
        property=HANDED,
        subject=device_with(accelerator=AnythingAdopted),
    ),
    Mutant(
        name="pinned-memory-is-handed-out-twice",
        clause="B6",
        broken="Two users of pinned memory write over each other.",
        property=HANDED,
        subject=device_with(accelerator=OnePinnedBlock),
        # Every property that counts leaks finds the block that is never released.
        also=(
            "a-fault-ends-what-depends-on-it-and-nothing-else",
            "a-lost-store-raises-control-lost",
            "ballots-outlive-the-rank-that-cast-them",
        ),
    ),
    Mutant(
        name="every-event-is-kept",
        clause="R1",
        broken="Events are never given back (Ascend's event pool).",
        property=GIVEN_BACK,
        subject=device_with(accelerator=EventPool),
    ),
    Mutant(
        name="every-store-stays-registered",
        clause="R1",
        broken="A registry keeps a dropped model's slots alive (vllm-ascend #14720).",
        property=GIVEN_BACK,
        subject=device_with(accelerator=StoreRegistry),
    ),
    Mutant(
        name="graphs-are-given-out-undeclared",
        clause="R2",
        broken="What is not declared seems to work.",
        property=UNDECLARED_CAPABILITIES,
        subject=device_with(
            dataclasses.replace(ALL_CAPABILITIES, graph_capture=False), accelerator=SilentGraphs
        ),
    ),
    Mutant(
        name="what-is-not-declared-is-a-null-pointer",
        clause="R2",
        broken="An undeclared call fails as it happens, not as Unsupported (FlagCX).",
        property=UNDECLARED_CAPABILITIES,
        subject=device_with(
            dataclasses.replace(ALL_CAPABILITIES, stream_lock=False), accelerator=NullLocks
        ),
    ),
    Mutant(
        name="a-parameter-has-another-name",
        clause="R3",
        broken="A call by keyword fails on this backend alone (DeepSpeed #8208).",
        property=SIGNED,
        subject=device_with(accelerator=RenamedParameter),
    ),
    Mutant(
        name="a-wait-has-a-default-time-out",
        clause="R3",
        broken="A work may be waited for without a time-out, for ever.",
        property="every-object-of-a-group-has-the-signatures-of-its-protocol",
        subject=network_with(work=ForeverWork),
    ),
    Mutant(
        name="importing-starts-a-thread",
        clause="R4",
        broken="A process that only imports the backend cannot be forked any more.",
        property="importing-a-backend-starts-nothing",
        subject=_waking,
    ),
)
