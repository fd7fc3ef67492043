"""Backends, the accelerators that they open, graphs, and pools of page-locked host memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from equipoise.hal.capabilities import Capabilities, Probe
from equipoise.hal.communicator import CommunicatorBackend
from equipoise.hal.errors import BackendUnavailable, UsageError
from equipoise.hal.kernels import Kernels
from equipoise.hal.lock import StreamLock
from equipoise.hal.slots import SlotLayout, SlotStore
from equipoise.hal.stream import Event, Role, Stream


@runtime_checkable
class Page(Protocol):
    """One page, owned by its caller until it is given back."""

    @property
    def data(self) -> Tensor:
        """uint8 [page_bytes], host memory."""
        ...

    def give_back(self, after: Event | None) -> None:
        """Return it to the pool, to be handed out again once `after` is reached (A13).

        `after` is recorded after the last copy that reads the page; None when no copy does.
        Raises `SlotError` when the page was given back before.
        """
        ...


@runtime_checkable
class HostPool(Protocol):
    """A fixed number of pages, page-locked where that is declared."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        ...

    def take(self, timeout: float) -> Page:
        """Return a page that no copy reads any more.

        Raises:
            PoolExhausted: none became free within `timeout` seconds.
        """
        ...


@dataclass(frozen=True)
class Topology:
    """Where the accelerator is: its index, the node's name, and its NUMA node (-1: unknown)."""

    index: int
    node: str
    numa: int


@dataclass(frozen=True)
class Memory:
    """Bytes of device memory."""

    total: int
    free: int


@runtime_checkable
class Graph(Protocol):
    """A captured sequence of launches."""

    def capture(self, stream: Stream, program: Callable[[], object]) -> None:
        """Record what `program` launches on `stream`, without running it."""
        ...

    def replay(self, stream: Stream) -> None:
        """Launch what was recorded; it runs even if the graph is dropped at once."""
        ...


@runtime_checkable
class Accelerator(Protocol):
    """One opened device."""

    @property
    def name(self) -> str:
        """The backend's name and the device's index."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its tensors live."""
        ...

    @property
    def kernels(self) -> Kernels:
        """Routing, counting, table and checksum kernels."""
        ...

    def stream(self, role: Role) -> Stream:
        """The stream of that role; the same one at every call."""
        ...

    def adopt(self, native_stream: object) -> Stream:
        """Wrap a stream that a serving engine owns. Raises `Unsupported`.

        It keeps working after a program raises; the launch of that program raises too (clause E7).
        """
        ...

    def event(self) -> Event:
        """Create an event."""
        ...

    def stream_lock(self, deadline: float) -> StreamLock:
        """Create a lock; after `deadline` seconds a poison releases the streams that wait for it.

        Raises `Unsupported`.
        """
        ...

    def slot_store(self, layout: SlotLayout) -> SlotStore:
        """Create the store of this rank's slots and their staging buffers."""
        ...

    def empty_private(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Device memory for such a tensor in the private format, contents undefined.

        Raises `Unsupported` where `slot_formats` lacks the format, or the dtype has none.
        """
        ...

    def storage_bytes(self, tensor: Tensor) -> Tensor:
        """A view of everything that a tensor at offset 0 stores, padding included: uint8 [n].

        The view does not own the memory: the caller keeps `tensor` alive while it uses the view.
        """
        ...

    def pinned(self, nbytes: int) -> Tensor:
        """Host memory, uint8 [nbytes], page-locked where that is declared."""
        ...

    def host_pool(self, page_bytes: int, pages: int) -> HostPool:
        """Create a pool of `pages` pages, allocated as by `pinned`."""
        ...

    def graph(self) -> Graph:
        """Create an empty graph. Raises `Unsupported`."""
        ...

    def topology(self) -> Topology:
        """Its index, node and NUMA node."""
        ...

    def memory(self) -> Memory:
        """Total and free bytes of device memory."""
        ...

    def synchronize(self, timeout: float) -> None:
        """Block the host until every stream has drained. Raises as `Stream.synchronize` does."""
        ...

    def close(self) -> None:
        """End every stream, within a bounded time."""
        ...


@runtime_checkable
class EstimatesRoutingMemory(Protocol):
    """Optional for backends and accelerators: estimates the memory that routing kernels need.

    `Tables` are not included.
    """

    def routing_bytes(self, layers: int, experts: int, slots: int) -> int:
        """Bytes of device memory for tables of that shape. Opens nothing."""
        ...


@runtime_checkable
class Backend(Protocol):
    """A kind of accelerator: the object that an entry point of `equipoise.accelerators` names."""

    @property
    def name(self) -> str:
        """The name that users select it by."""
        ...

    @property
    def communicator(self) -> str:
        """Name of its default communicator backend; empty where it has none.

        The conformance suite then judges devices by themselves.
        """
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What its devices can do; readable before anything is opened."""
        ...

    def probe(self) -> Probe:
        """Whether it can run on this machine."""
        ...

    def devices(self) -> int:
        """Number of devices that can be opened: 0 where `probe` is `Unavailable`. Opens none.

        Ranks use them round-robin, see `open_for_rank`.
        """
        ...

    def open(self, index: int) -> Accelerator:
        """Open device `index`, below `devices()`. Raises `BackendUnavailable`."""
        ...


def check_device_count(backend: Backend, communicator: CommunicatorBackend, ranks: int) -> None:
    """Raise `UsageError` when one machine has fewer devices than `ranks` needs (B9)."""
    devices = backend.devices()
    if ranks > devices and not communicator.capabilities.shared_devices:
        raise UsageError(
            f"{ranks} ranks need {ranks} devices, and {backend.name} has {devices} here: "
            f"{communicator.name} takes one rank a device"
        )


def open_for_rank(backend: Backend, rank: int) -> Accelerator:
    """Open the device of `rank`, number rank modulo `devices()`; communicators rely on that.

    Raises `BackendUnavailable` if there is no device.
    """
    count = backend.devices()
    if count < 1:
        raise BackendUnavailable(f"backend {backend.name!r} has no device for rank {rank}")
    return backend.open(rank % count)
