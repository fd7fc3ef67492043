"""Where a worker is: its device as an accelerator of ours, and the ranks of one of its groups.

The engine has a device, process groups and streams already. The device is opened once more, which
takes nothing; the stream that the engine is on becomes the compute stream. Ranks meet over a store
that the first rank of the group holds: an engine has no launcher of ours that would outlive every
rank, and ends as a whole when a worker dies.
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
"""Bytes."""
BACKEND_OF_DEVICE = {"cpu": "cpu", "cuda": "cuda", "npu": "ascend"}
"""By type of the engine's device."""


class EngineGroup(Protocol):
    """A process group of the engine, as far as it is needed here."""

    ranks: list[int]
    rank_in_group: int
    world_size: int
    cpu_group: Any


@dataclass(frozen=True)
class WorkerContext:
    """One worker's place in one group.

    Attributes:
        accelerator: the worker's device, with the engine's stream as its compute stream.
        streams: the engine's, which our work comes between.
        fabric: to the other ranks of the group.
        node_of_rank: the node of each rank of the group, numbered as they first come.
        store_host: the store, on the group's first rank.
        deadline: seconds that any wait may last.
    """

    accelerator: Accelerator
    streams: EngineStreams
    fabric: Fabric
    node_of_rank: tuple[int, ...]
    store_host: StoreHost | None
    deadline: float

    def close(self) -> None:
        """Part from the other ranks."""
        self.fabric.close()
        self.accelerator.close()
        if self.store_host is not None:
            self.store_host.close()


def open_worker_context(
    group: EngineGroup, device: torch.device, deadline: float, communicator: str | None = None
) -> WorkerContext:
    """Meet the ranks of `group`; collective.

    Args:
        group: of the engine.
        device: the worker's; the group's own attribute of that name is a number in some engines.
        deadline: seconds that any wait may last.
        communicator: one of `COMMUNICATORS` for the device; None: the first of them.

    Raises:
        IntegrationError: no backend of ours is for the engine's device, or the communicator is not.
        BackendUnavailable, ControlLost: the backend does not run here; the ranks did not meet.
    """
    device_type = device.type
    if device_type not in BACKEND_OF_DEVICE:
        choices = ", ".join(BACKEND_OF_DEVICE)
        raise IntegrationError(f"no backend for a device of type {device_type!r}: {choices}")
    communicator_name = _choose_communicator(device_type, communicator)
    with ExitStack() as stack:
        accelerator, streams = _opened(BACKEND_OF_DEVICE[device_type], device, deadline)
        stack.callback(accelerator.close)
        node_of_rank = _find_node_of_rank(group)
        interface = _store_interface(node_of_rank)
        store_host = StoreHost(interface) if group.rank_in_group == 0 else None
        if store_host is not None:
            stack.callback(store_host.close)
        host, port = _told(group, store_host)
        rendezvous = Rendezvous(
            rank=group.rank_in_group,
            size=group.world_size,
            host=host,
            port=port,
            deadline=deadline,
        )
        fabric = connect_fabric(communicator_name, rendezvous, accelerator)
        stack.pop_all()
    return WorkerContext(accelerator, streams, fabric, node_of_rank, store_host, deadline)


def connect_fabric(communicator: str, rendezvous: Rendezvous, accelerator: Accelerator) -> Fabric:
    """Meet the other ranks; gloo reaches the tensors of a device through the host."""
    fabric = registry.communicator(communicator).connect(rendezvous)
    if communicator == "gloo" and accelerator.device.type != "cpu":
        return HostStagedFabric(fabric, accelerator, rendezvous.deadline)
    return fabric


def ranks_within(world: EngineGroup, group: EngineGroup) -> list[int]:
    """The ranks of `group`, numbered as on a fabric among the ranks of `world`."""
    return [world.ranks.index(rank) for rank in group.ranks]


def _choose_communicator(device_type: str, requested: str | None) -> str:
    """Raises `IntegrationError` where what is wanted is not for a device of that type."""
    choices = COMMUNICATORS[device_type]
    if requested is not None and requested not in choices:
        raise IntegrationError(
            f"communicator {requested} is not for a device of type {device_type}: {' or '.join(choices)}"
        )
    return requested or choices[0]


def _opened(name: str, device: torch.device, deadline: float) -> tuple[Accelerator, EngineStreams]:
    inner = registry.accelerator(name).open(device.index or 0)
    if device.type == "cpu":
        return inner, HostEngineStreams(inner.stream(Role.COMPUTE), deadline)
    vendor = getattr(torch, device.type)
    streams = DeviceEngineStreams(inner, lambda: vendor.current_stream(device))
    return cast(Accelerator, EngineAccelerator(inner, streams.compute_stream)), streams


def _find_node_of_rank(group: EngineGroup) -> tuple[int, ...]:
    """The node of each rank, numbered as they first come; collective."""
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
    """Where the store is held: on loopback, if all ranks are on one node."""
    from vllm.utils.network_utils import get_ip

    return str(get_ip()) if max(node_of_rank) else LOOPBACK


def _told(group: EngineGroup, store_host: StoreHost | None) -> tuple[str, int]:
    """Where the first rank holds the store, as every rank learns it."""
    buffer = torch.zeros(MAX_ADDRESS_BYTES, dtype=torch.uint8)
    if store_host is not None:
        text = json.dumps(store_host.address).encode().ljust(MAX_ADDRESS_BYTES)
        buffer.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(buffer, src=group.ranks[0], group=group.cpu_group)
    host, port = json.loads(bytes(buffer.tolist()))
    return str(host), int(port)
