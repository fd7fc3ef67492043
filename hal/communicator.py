"""Collectives and asynchronous point-to-point among ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from equipoise.hal.capabilities import CommunicatorCapabilities, Probe
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.work import Work


@dataclass(frozen=True)
class PeerBuffer:
    """One blob of a round: uint8 [bytes] to or from `peer`."""

    peer: int
    blob: Tensor


@dataclass(frozen=True)
class Exchange:
    """What one rank sends and receives in one round: at most one blob per peer and direction.

    HCCL documents that rule for batched point-to-point; every backend keeps it.
    """

    sends: tuple[PeerBuffer, ...]
    receives: tuple[PeerBuffer, ...]

    def __post_init__(self) -> None:
        for side in (self.sends, self.receives):
            peers = [buffer.peer for buffer in side]
            if len(set(peers)) != len(peers):
                raise ValueError(f"more than one blob for a peer in one round: {sorted(peers)}")


@runtime_checkable
class Communicator(Protocol):
    """A group of ranks with one purpose; every operation returns its `Work` at once.

    Operations have the deadline that the communicator was opened with; one that passes it, or that
    no peer matches, fails the communicator until `rebuild`. Matching is first in first out per
    (source, destination); there are no tags. An unsupported dtype or layout raises
    `Unsupported` before any side effect. All ranks issue collectives in one order. Tensors that are
    not a result are only read (X4).
    """

    @property
    def purpose(self) -> str:
        """What the communicator is for; part of every error."""
        ...

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def capabilities(self) -> CommunicatorCapabilities:
        """What it can do."""
        ...

    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum `tensor` over ranks, in place; integers stay exact."""
        ...

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """`out` [size, *tensor.shape] receives every rank's `tensor`."""
        ...

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> Work:
        """`out` receives this rank's part of the sum of `tensor` [size, *out.shape]."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Copy `tensor` of rank `source` to `tensor` of every other rank."""
        ...

    def all_to_all(self, out: Tensor, tensor: Tensor) -> Work:
        """Row block i of `tensor` [size, ...] goes to rank i; `out` has the same shape."""
        ...

    def all_to_all_uneven(
        self, out: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> Work:
        """`sends[i]` rows of `tensor` go to rank i, `receives[i]` rows of `out` come from it."""
        ...

    def barrier(self) -> Work:
        """Ends after every rank has issued it."""
        ...

    def isend(self, tensor: Tensor, destination: int) -> Work:
        """Send `tensor`; ends no earlier than its receive is posted (rendezvous)."""
        ...

    def irecv(self, tensor: Tensor, source: int) -> Work:
        """Receive into `tensor`."""
        ...

    def exchange(self, round: Exchange) -> Work:
        """One round of blobs, receives posted before sends.

        A rank that only sends may finish before the others arrive, as in a collective.
        """
        ...

    def warm(self, links: Sequence[tuple[int, int]]) -> None:
        """Build the links in this order, which must be the same on every rank."""
        ...

    def abort(self) -> None:
        """End operations in flight with an error. Raises `Unsupported` if it is not declared."""
        ...

    def rebuild(self, ranks: Sequence[int]) -> None:
        """Make the communicator usable among `ranks` after a failure; collective like `open`."""
        ...

    def close(self) -> None:
        """Release all resources, within the communicator's deadline."""
        ...


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Address of the store where the ranks of a run meet; the launcher holds it if it has one."""

    rank: int
    size: int
    host: str
    port: int
    deadline: float
    """Seconds that any wait may last."""
    namespace: str = ""
    """What the keys of this run begin with, in a store that outlives it or that others use too."""
    hosts_store: bool = False
    """Whether this rank holds the store at `host`:`port`, because no launcher does."""


@runtime_checkable
class Fabric(Protocol):
    """A rank's connection to all others: its control plane, and communicators by purpose."""

    @property
    def control(self) -> ControlPlane:
        """The control plane."""
        ...

    def open(self, purpose: str, ranks: Sequence[int] | None = None) -> Communicator:
        """Open a separate communicator for `purpose` among `ranks`, by default all ranks.

        Collective: all of `ranks` call it with the same order of `ranks`; the position in that
        order is the rank in the communicator. A purpose is opened once. After the return no other
        member needs this rank in order to open: it may exit at once (clause X8).

        Raises:
            CommunicatorFailed: a rank did not arrive by the deadline.
            Unsupported: this rank is not one of `ranks`.
        """
        ...

    def close(self) -> None:
        """Close every communicator and the control plane."""
        ...


@runtime_checkable
class RendezvousHost(Protocol):
    """The store of the control plane; the launcher holds it, so it outlives every rank."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port for `Rendezvous`."""
        ...

    def report_loss(self, rank: int, how: str) -> None:
        """Tell the ranks that `rank` is lost; only the first loss of a run is kept."""
        ...

    def beat(self, rank: int) -> tuple[int, str]:
        """Number of heartbeats from `rank`, and its operation at the last one."""
        ...

    def close(self) -> None:
        """Stop the store and release its port."""
        ...


@runtime_checkable
class EstimatesCommunicatorMemory(Protocol):
    """Optional for backends: estimates the device memory of communicators."""

    def device_bytes(self, communicators: int, links: int) -> int:
        """Bytes of device memory for that many communicators, and links of one rank."""
        ...


@runtime_checkable
class CommunicatorBackend(Protocol):
    """A kind of communicator: what an entry point of `equipoise.communicators` names."""

    @property
    def name(self) -> str:
        """The name that users select it by."""
        ...

    @property
    def capabilities(self) -> CommunicatorCapabilities:
        """What its communicators can do; readable before anything is opened."""
        ...

    def probe(self) -> Probe:
        """Whether it can run on this machine."""
        ...

    def launcher_rendezvous(self) -> Rendezvous | None:
        """The rendezvous of this process if the backend's own launcher started it, else None.

        For backends that bring a launcher (mpiexec); every process of the launch calls it.
        """
        ...

    def host(self) -> RendezvousHost:
        """Start a store on a free port of this machine; for launchers.

        Raises `Unsupported` where only the backend's own launcher can start ranks.
        """
        ...

    def connect(self, rendezvous: Rendezvous) -> Fabric:
        """Join the other ranks. Raises `ControlPlaneLost` when the store does not answer."""
        ...
