"""Access of a worker to its device and to the other ranks of one of its groups.

The engine already has a device, process groups and streams. Our accelerator opens the same device
again, which takes no memory, and uses the engine's stream as compute stream. Ranks connect through
a store on the group's first rank. That is sufficient, although the store ends with that rank: an
engine ends as a whole when a worker dies.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from equipoise.backends.common.tcp_store import LOOPBACK, StoreHost
from equipoise.backends.devices.host_staging import HostStagedFabric
from equipoise.hal import registry
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Fabric, Rendezvous
from equipoise.hal.errors import IntegrationError
from equipoise.hal.stream import Role
from equipoise.integrations.vllm.settings import COMMUNICATORS
from equipoise.integrations.vllm.streams import (
    DeviceEngineStreams,
    EngineAccelerator,
    EngineStreams,
    HostEngineStreams,
)

MAX_ADDRESS_BYTES = 256
"""Size of the broadcast that carries the store's address: all ranks need the size beforehand."""
BACKEND_OF_DEVICE = {"cpu": "cpu", "cuda": "cuda", "npu": "ascend"}
"""Our backend by device type."""


class EngineGroup(Protocol):
    """The part of an engine's process group that is used here."""

    ranks: list[int]
    rank_in_group: int
    world_size: int
    cpu_group: Any


@dataclass(frozen=True)
class WorkerContext:
    """Device, streams and connections of one worker in one group.

    Attributes:
        accelerator: the worker's device, with the engine's stream as compute stream.
        streams: order our work with the engine's.
        fabric: to the other ranks of the group.
        node_of_rank: the node of each rank of the group, numbered by first occurrence.
        store_host: the store, on the group's first rank; else None.
        deadline: seconds that any wait may last.
    """

    accelerator: Accelerator
    streams: EngineStreams
    fabric: Fabric
    node_of_rank: tuple[int, ...]
    store_host: StoreHost | None
    deadline: float

    def close(self) -> None:
        """Disconnect from the other ranks, and close the device."""
        self.fabric.close()
        self.accelerator.close()
        if self.store_host is not None:
            self.store_host.close()


def open_worker_context(
    group: EngineGroup, device: torch.device, deadline: float, communicator: str | None = None
) -> WorkerContext:
    """Connect to the ranks of `group`; collective.

    Args:
        group: of the engine.
        device: the worker's device (not `group.device`, which is a number in some engines).
        deadline: seconds that any wait may last.
        communicator: one of `COMMUNICATORS` for the device; None: the first of them.

    Raises:
        IntegrationError: we have no backend for the device, or the communicator does not support
            it.
        BackendUnavailable: the backend does not run here.
        ControlPlaneLost, BallotIncomplete: the ranks did not connect.
    """
    backend = backend_of_device(device)
    communicator_name = _choose_communicator(device.type, communicator)
    with ExitStack() as stack:
        accelerator, streams = open_device(backend, device, deadline)
        stack.callback(accelerator.close)
        node_of_rank = _find_node_of_rank(group)
        interface = _store_interface(node_of_rank)
        store_host = StoreHost(interface) if group.rank_in_group == 0 else None
        if store_host is not None:
            stack.callback(store_host.close)
        host, port = _broadcast_address(group, store_host)
        rendezvous = Rendezvous(
            rank=group.rank_in_group,
            size=group.world_size,
            host=host,
            port=port,
            deadline=deadline,
        )
        fabric = connect_fabric(communicator_name, rendezvous, accelerator)
        stack.callback(fabric.close)
        await_all_connected(fabric, deadline)
        stack.pop_all()
    return WorkerContext(accelerator, streams, fabric, node_of_rank, store_host, deadline)


def connect_fabric(communicator: str, rendezvous: Rendezvous, accelerator: Accelerator) -> Fabric:
    """Connect to the other ranks; gloo gets tensors of a device through host memory."""
    fabric = registry.communicator(communicator).connect(rendezvous)
    if communicator == "gloo" and accelerator.device.type != "cpu":
        return HostStagedFabric(fabric, accelerator, rendezvous.deadline)
    return fabric


def await_all_connected(fabric: Fabric, deadline: float) -> None:
    """Return when every rank has connected; collective.

    The store is on the first rank. If that rank left before another had connected, for example
    because its engine cannot start, the other would look for the store until the deadline. So it
    also waits until all others know that all are there.

    Raises:
        BallotIncomplete: a rank has not connected by the deadline.
        ControlPlaneLost: the store does not answer.
    """
    control = fabric.control
    control.cast("connected", b"")
    control.collect("connected", deadline)
    control.cast("all connected", b"")
    if control.rank == 0:
        control.collect("all connected", deadline)


def ranks_within(world: EngineGroup, group: EngineGroup) -> list[int]:
    """Return the ranks of `group` as numbered on a fabric among the ranks of `world`."""
    return [world.ranks.index(rank) for rank in group.ranks]


def _choose_communicator(device_type: str, requested: str | None) -> str:
    """Return the communicator. Raises `IntegrationError` if it does not support the device."""
    choices = COMMUNICATORS[device_type]
    if requested is not None and requested not in choices:
        raise IntegrationError(
            f"communicator {requested} is not for a device of type {device_type}: "
            f"{' or '.join(choices)}"
        )
    return requested or choices[0]


def backend_of_device(device: torch.device) -> str:
    """Return the name of our backend. Raises `IntegrationError` if there is none for the device."""
    if device.type not in BACKEND_OF_DEVICE:
        choices = ", ".join(BACKEND_OF_DEVICE)
        raise IntegrationError(f"no backend for a device of type {device.type!r}: {choices}")
    return BACKEND_OF_DEVICE[device.type]


def open_device(
    backend: str, device: torch.device, deadline: float
) -> tuple[Accelerator, EngineStreams]:
    """Open the engine's device; the stream that is current becomes the compute stream.

    Args:
        backend: as `backend_of_device` returns it.
        device: the engine's.
        deadline: seconds that a wait for the stream of a CPU may last.

    Raises `BackendUnavailable` if the backend does not run here.
    """
    inner = registry.accelerator(backend).open(device.index or 0)
    if device.type == "cpu":
        return inner, HostEngineStreams(inner.stream(Role.COMPUTE), deadline)
    vendor = getattr(torch, device.type)
    streams = DeviceEngineStreams(inner, lambda: vendor.current_stream(device))
    return cast(Accelerator, EngineAccelerator(inner, streams.compute_stream)), streams


def _find_node_of_rank(group: EngineGroup) -> tuple[int, ...]:
    """Return the node of each rank, numbered by first occurrence; collective."""
    from vllm.distributed.parallel_state import in_the_same_node_as

    if group.world_size == 1:
        return (0,)
    node_by_rank: dict[int, int] = {}
    for rank in range(group.world_size):
        if rank not in node_by_rank:
            node = len(set(node_by_rank.values()))
            same_node = in_the_same_node_as(group.cpu_group, source_rank=rank)
            node_by_rank |= {
                peer: node
                for peer, is_local in enumerate(same_node)
                if is_local and peer not in node_by_rank
            }
    return tuple(node_by_rank[rank] for rank in range(group.world_size))


def _store_interface(node_of_rank: Sequence[int]) -> str:
    """Return the interface for the store: loopback if all ranks are on one node."""
    from vllm.utils.network_utils import get_ip

    return str(get_ip()) if max(node_of_rank) else LOOPBACK


def _broadcast_address(group: EngineGroup, store_host: StoreHost | None) -> tuple[str, int]:
    """Broadcast the address of the store from the first rank; returns host and port."""
    buffer = torch.zeros(MAX_ADDRESS_BYTES, dtype=torch.uint8)
    if store_host is not None:
        text = json.dumps(store_host.address).encode().ljust(MAX_ADDRESS_BYTES)
        buffer.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(buffer, src=group.ranks[0], group=group.cpu_group)
    host, port = json.loads(bytes(buffer.tolist()))
    return str(host), int(port)
