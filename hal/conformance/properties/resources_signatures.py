"""Family *resources*: objects have the signatures of their protocol, name by name (clause R3)."""

import inspect
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from equipoise.hal.accelerator import Accelerator, Backend, Graph, HostPool, Page
from equipoise.hal.communicator import Communicator, Fabric
from equipoise.hal.conformance.context import NEXT, Play, RankContext, require, wait_for_success
from equipoise.hal.conformance.fixtures.slot_store import make_plain_slot_store
from equipoise.hal.conformance.program import Program, make_program
from equipoise.hal.conformance.property import Property, PropertyScope, Traits
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.kernels import Kernels
from equipoise.hal.lock import StreamLock
from equipoise.hal.slots import Lease, Reader, SlotStore
from equipoise.hal.stream import Event, Role, Stream
from equipoise.hal.work import Work

FAMILY = "resources"
Parameter = tuple[str, Any, Any]
"""Name, kind, default."""


def protocol_members(protocol: type) -> dict[str, Any]:
    """What the protocol names."""
    return {name: m for name, m in vars(protocol).items() if not name.startswith("_")}


def signature_differences(protocol: type, implementation: object) -> list[str]:
    """What is not as the protocol says, a line each; `implementation` is an object or its class."""
    lines = []
    for name, member in protocol_members(protocol).items():
        own = inspect.getattr_static(implementation, name, None)
        if own is None:
            lines.append(f"has no {name}")
        elif isinstance(member, property) and callable(own):
            lines.append(f"{name} is a method, not an attribute")
        elif inspect.isfunction(member) and not callable(own):
            lines.append(f"{name} is an attribute, not a method")
        elif inspect.isfunction(member):
            lines += _compare(name, _parameters(member), _parameters(getattr(implementation, name)))
    kind = implementation if isinstance(implementation, type) else type(implementation)
    return [f"{kind.__name__} for {protocol.__name__}: {line}" for line in lines]


def _parameters(function: Any) -> list[Parameter]:
    """In order, without `self`."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters if p.name != "self"]


def _compare(name: str, expected: list[Parameter], own: list[Parameter]) -> list[str]:
    if own == expected:
        return []
    return [f"{name} takes {_format_parameters(own)}, not {_format_parameters(expected)}"]


def _format_parameters(parameters: list[Parameter]) -> str:
    unannotated = [
        inspect.Parameter(name, kind, default=default) for name, kind, default in parameters
    ]
    return str(inspect.Signature(unannotated))


def _empty_program(_: Traits) -> st.SearchStrategy[Program]:
    return st.just(make_program([]))


def _require_signatures(pairs: Iterable[tuple[type, object]]) -> None:
    for protocol, implementation in pairs:
        wrong = signature_differences(protocol, implementation)
        require("R3", not wrong, "; ".join(wrong))


def _play_device(ctx: RankContext, _: Program) -> Play:
    _require_signatures(_device_objects(ctx))
    yield NEXT


def _device_objects(ctx: RankContext) -> Iterable[tuple[type, object]]:
    """One object of every kind that a device hands out, as far as its capabilities go."""
    device, store = ctx.accelerator, make_plain_slot_store(ctx, 1, 1, 1).store
    stream = device.stream(Role.COMPUTE)
    yield from ((Backend, ctx.backend), (Accelerator, device), (Kernels, device.kernels))
    yield from ((Stream, stream), (Event, device.event()), (SlotStore, store))
    yield from ((Reader, store.attach(stream)), (Lease, store.lease([0])))
    pool = device.host_pool(1, 1)
    yield from ((HostPool, pool), (Page, pool.take(ctx.timeout)))
    if ctx.backend.capabilities.stream_lock:
        yield StreamLock, device.stream_lock(ctx.deadline)
    if ctx.backend.capabilities.graph_capture:
        yield Graph, device.graph()


def _play_group(ctx: RankContext, _: Program) -> Play:
    fabric = ctx.fabric
    require("R3", fabric, "no fabric was handed out")
    comm = yield from ctx.communicator()
    work = comm.barrier()
    assert fabric is not None
    pairs = ((Fabric, fabric), (ControlPlane, fabric.control), (Communicator, comm), (Work, work))
    _require_signatures(pairs)
    yield from wait_for_success(ctx, work, "the barrier")


PROPERTIES = (
    Property(
        name="every-object-has-the-signatures-of-its-protocol",
        family=FAMILY,
        clauses=("R3",),
        claim="Names, order, kinds and defaults are those of the protocols, on every object.",
        programs=_empty_program,
        play=_play_device,
    ),
    Property(
        name="every-object-of-a-group-has-the-signatures-of-its-protocol",
        family=FAMILY,
        clauses=("R3",),
        claim="The same for fabrics, communicators, works and the control plane.",
        programs=_empty_program,
        play=_play_group,
        scope=PropertyScope.GROUP,
    ),
)
