"""Pages of host memory that copies read from.

Backends, and the accelerators they open.
"""

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
    """One page, held by its taker until it is given back."""

    @property
    def data(self) -> Tensor:
        """uint8 [page_bytes], host memory."""
        ...

    def give_back(self, after: Event | None) -> None:
        """Return it to the pool, to be handed out again once `after` is reached (A13).

        `after` is recorded behind the last copy that reads the page; None when none does. Giving
        a page back twice raises `SlotError`.
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
        """A page that no copy reads any more.

        Raises:
            PoolExhausted: none became free within `timeout` seconds.
        """
        ...


@dataclass(frozen=True)
class Topology:
    """Where the accelerator sits: its index, the node's name, and its NUMA node (-1: unknown)."""

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
        """Launch what was recorded."""
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
        """The small kernels."""
        ...

    def stream(self, role: Role) -> Stream:
        """The stream of that role: always the same one."""
        ...

    def adopt(self, native_stream: object) -> Stream:
        """Wrap a stream that a serving engine owns. Raises `Unsupported`.

        It goes on when a program raises: the launch of that program does, too (clause E7).
        """
        ...

    def event(self) -> Event:
        """A fresh event."""
        ...

    def stream_lock(self, deadline: float) -> StreamLock:
        """A fresh lock, whose waiting streams are released by a poison after `deadline` seconds.

        Raises `Unsupported`.
        """
        ...

    def slot_store(self, layout: SlotLayout) -> SlotStore:
        """The slots of this rank, with their staging."""
        ...

    def empty_private(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Device memory for such a tensor in the private format, contents undefined.

        Raises `Unsupported` where `slot_formats` lacks it, or it does not know the dtype.
        """
        ...

    def storage_bytes(self, tensor: Tensor) -> Tensor:
        """Everything that a tensor at offset 0 stores, padding included: uint8 [n], in place.

        The memory is the tensor's own, which the caller keeps as long as it uses the result.
        """
        ...

    def pinned(self, nbytes: int) -> Tensor:
        """Host memory, uint8 [nbytes], page-locked where that is declared."""
        ...

    def host_pool(self, page_bytes: int, pages: int) -> HostPool:
        """So many pages of host memory, as `pinned` gives it."""
        ...

    def graph(self) -> Graph:
        """An empty graph. Raises `Unsupported`."""
        ...

    def topology(self) -> Topology:
        """Where it sits."""
        ...

    def memory(self) -> Memory:
        """How much memory it has."""
        ...

    def synchronize(self, timeout: float) -> None:
        """Drain every stream. Raises as `Stream.synchronize` does."""
        ...

    def close(self) -> None:
        """End every stream; bounded."""
        ...


@runtime_checkable
class EstimatesRoutingMemory(Protocol):
    """What a backend may have besides, and the accelerators that it opens: it knows the memory that
    its kernels keep for routing, beside `Tables`.
    """

    def routing_bytes(self, layers: int, experts: int, slots: int) -> int:
        """Bytes of a device that go with tables of that shape. Opens nothing."""
        ...


@runtime_checkable
class Backend(Protocol):
    """What an entry point of `equipoise.accelerators` names."""

    @property
    def name(self) -> str:
        """The name it is chosen by."""
        ...

    @property
    def communicator(self) -> str:
        """Name of the communicator backend that goes with it unless another is asked for."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Readable before anything is opened."""
        ...

    def probe(self) -> Probe:
        """Whether it can run here."""
        ...

    def devices(self) -> int:
        """How many devices can be opened: 0 where `probe` says unavailable. Opens none.

        Ranks take them in turn, as `open_for_rank` says.
        """
        ...

    def open(self, index: int) -> Accelerator:
        """Open device `index`, below `devices()`. Raises `BackendUnavailable`."""
        ...


def check_device_count(backend: Backend, communicator: CommunicatorBackend, ranks: int) -> None:
    """Raise `UsageError` when so many ranks of one machine find too few devices (B9)."""
    found = backend.devices()
    if ranks > found and not communicator.capabilities.shared_devices:
        raise UsageError(
            f"{ranks} ranks need {ranks} devices, and {backend.name} has {found} here: "
            f"{communicator.name} takes one rank a device"
        )


def open_for_rank(backend: Backend, rank: int) -> Accelerator:
    """The device of `rank`: number rank modulo `devices()`, which its communicators rely on.

    Raises `BackendUnavailable` if there is no device.
    """
    count = backend.devices()
    if count < 1:
        raise BackendUnavailable(f"backend {backend.name!r} has no device for rank {rank}")
    return backend.open(rank % count)
