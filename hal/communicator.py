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
    """What one rank sends and receives in one round: at most one blob a peer and direction.

    HCCL documents that rule for batched point-to-point; every backend keeps it.
    """

    sends: tuple[PeerBuffer, ...]
    receives: tuple[PeerBuffer, ...]

    def __post_init__(self) -> None:
        for side in (self.sends, self.receives):
            peers = [parcel.peer for parcel in side]
            if len(set(peers)) != len(peers):
                raise ValueError(f"more than one blob for a peer in one round: {sorted(peers)}")


@runtime_checkable
class Communicator(Protocol):
    """A group of ranks that does one job; every operation returns at once with its `Work`.

    Operations carry the deadline that the communicator was opened with; one that passes it, and
    one that is unmatched, fails the communicator until `rebuild`. Matching is first in first out
    per (source, destination); there are no tags. An unsupported dtype or layout raises
    `Unsupported` before any side effect. All ranks issue collectives in one order.
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
        """How many ranks."""
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
        """`tensor` of rank `source` replaces everybody's."""
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
        """Send; ends at the earliest when the receive is posted (rendezvous)."""
        ...

    def irecv(self, tensor: Tensor, source: int) -> Work:
        """Post a receive."""
        ...

    def exchange(self, round: Exchange) -> Work:
        """One round of blobs, receives posted before sends.

        A rank that only sends may be through before the others come, as in a collective.
        """
        ...

    def warm(self, links: Sequence[tuple[int, int]]) -> None:
        """Build the links in this order; the order is the same on every rank."""
        ...

    def abort(self) -> None:
        """End what is in flight with an error. Raises `Unsupported` where that cannot be."""
        ...

    def rebuild(self, ranks: Sequence[int]) -> None:
        """Make the communicator usable again among `ranks`, after a failure; returns as `open`."""
        ...

    def close(self) -> None:
        """Give everything back; bounded by the communicator's deadline."""
        ...


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one run meet. The store lives in the launcher, not on a rank, wherever the
    launcher has one."""

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
        """A communicator of its own for `purpose` among `ranks`, all of them by default.

        Collective: every one of these ranks opens it, in the same order of `ranks`; the place in
        that order is its rank there. A purpose is opened once. When it has returned, no other
        member needs this rank in order to open: it may leave at once (clause X8). Raises
        `CommunicatorFailed` when a rank does not come by the deadline, and `Unsupported` when this
        rank is not one of them.
        """
        ...

    def close(self) -> None:
        """Close every communicator and the control plane."""
        ...


@runtime_checkable
class RendezvousHost(Protocol):
    """The store of the control plane, held by the launcher: it outlives every rank."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port for `Rendezvous`."""
        ...

    def report_loss(self, rank: int, how: str) -> None:
        """Tell the ranks that `rank` is gone; only the first loss of a run is kept."""
        ...

    def beat(self, rank: int) -> tuple[int, str]:
        """How many heartbeats came from `rank`, and what it was doing at the last one."""
        ...

    def close(self) -> None:
        """Give the port back."""
        ...


@runtime_checkable
class EstimatesCommunicatorMemory(Protocol):
    """What a backend may have besides: it knows the memory that its communicators take."""

    def device_bytes(self, communicators: int, links: int) -> int:
        """Bytes of a device that so many communicators, and links of one rank, will hold."""
        ...


@runtime_checkable
class CommunicatorBackend(Protocol):
    """What an entry point of `equipoise.communicators` names."""

    @property
    def name(self) -> str:
        """The name it is chosen by."""
        ...

    @property
    def capabilities(self) -> CommunicatorCapabilities:
        """Readable before anything is opened."""
        ...

    def probe(self) -> Probe:
        """Whether it can run here."""
        ...

    def launcher_rendezvous(self) -> Rendezvous | None:
        """Where this process stands if the backend's own launcher started it, else None.

        For backends that bring a launcher (mpiexec); every process of the launch calls it.
        """
        ...

    def host(self) -> RendezvousHost:
        """A store on this machine, on a free port; for launchers.

        Raises `Unsupported` where only the backend's own launcher can start ranks.
        """
        ...

    def connect(self, rendezvous: Rendezvous) -> Fabric:
        """Meet the other ranks. Raises `ControlPlaneLost` when the store does not answer."""
        ...
