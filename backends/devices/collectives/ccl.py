"""What libraries are given: bytes, on the communicator's device.

What a vendor's library of collectives brings: HCCL and NCCL are two of a kind, up to this.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from equipoise.backends.devices.collectives.bootstrap import Bootstrap
from equipoise.backends.devices.runtime import Device, DeviceRuntime
from equipoise.hal.capabilities import CommunicatorCapabilities, Probe
from equipoise.hal.errors import Unsupported

TRANSFER_DTYPES = frozenset(
    {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    | {torch.float8_e4m3fn, torch.float8_e5m2}
)
"""Everything that has bytes: what moves travels as int8."""
INTEGER_SUM_DTYPES = frozenset({torch.int32, torch.int64})
FLOAT_SUM_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""What is summed: the one always exactly, the other where the library adds in one order (D1)."""


def as_bytes(tensor: Tensor) -> Tensor:
    """int8 [nbytes]: an element type that every library knows."""
    return tensor.detach().view(-1).view(torch.int8)


def check_device(device: Device, tensors: Sequence[Tensor]) -> None:
    """All on the communicator's own device. Raises `Unsupported`."""
    for tensor in tensors:
        if tensor.device.index != device.index:
            raise Unsupported(f"a tensor on {device.torch} is needed, got {tensor.device}")


@dataclass(frozen=True)
class CommSpec:
    """What a group is made of.

    Attributes:
        name: no other of this process has it.
        ranks: members, numbers of the run.
        rank: this rank's place among them.
        is_link: whether it carries messages from its first rank to its second, and nothing else.
        deadline: seconds that an operation may take.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    is_link: bool
    deadline: float

    def for_attempt(self, attempt: int) -> "CommSpec":
        """For another attempt to make it: no library is told the same name twice."""
        return replace(self, name=f"{self.name}/attempt{attempt}")


class CclHandle(Protocol):
    """One operation that was launched. Nothing here blocks the host."""

    def block_stream(self) -> None:
        """Make the current stream wait for the end."""
        ...

    def is_complete(self) -> bool:
        """Whether the device has come behind the operation. Raises RuntimeError after an error."""
        ...

    def error(self) -> str:
        """The error that the library reports of the whole group; nothing where it reports none."""
        ...


class CclComm(Protocol):
    """One of the library's communicators; tensors are contiguous, on the device, and not empty.

    Each operation is ordered behind the current stream, and runs on the one stream of the group, in
    the order of the calls. All of them report what went wrong as a RuntimeError. Not for several
    threads, but for `abort`, `closed` and the handles.
    """

    @property
    def stream(self) -> Any:
        """The vendor's stream that it runs on; nobody else uses it."""
        ...

    def all_reduce(self, tensor: Tensor) -> CclHandle:
        """Sum in place."""
        ...

    def all_gather(self, out: Tensor, tensor: Tensor) -> CclHandle:
        """`out` has the tensors of all ranks one after the other."""
        ...

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> CclHandle:
        """`out` has this rank's part of the sum."""
        ...

    def broadcast(self, tensor: Tensor, root: int) -> CclHandle:
        """From one rank to all."""
        ...

    def all_to_all(
        self, out: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> CclHandle:
        """Bytes to and from each rank, int8; no counts at all mean even parts."""
        ...

    def message(self, operation: str, blob: Tensor, peer: int) -> CclHandle:
        """One message, `isend` or `irecv`, of a group in which messages go one way only.

        A send ends when its receive does, or later: one that nobody receives never ends (P3).
        """
        ...

    def batch(
        self, operations: Sequence[str], blobs: Sequence[Tensor], peers: Sequence[int]
    ) -> CclHandle:
        """A round of messages, at most one a peer and direction; one handle for all of them.

        It ends when this rank has received everything; what it sends may be received later.
        """
        ...

    def abort(self) -> None:
        """End what is under way, and give the group back, without the other members.

        Only begins that, and never blocks. Called once, from any thread, where the library aborts.
        """
        ...

    def close(self) -> None:
        """Give it back; nothing is under way on any member. Only begins that, and never blocks."""
        ...

    @property
    def closed(self) -> bool:
        """Whether it was given back, by now."""
        ...


@dataclass(frozen=True)
class WarmupOps:
    """The first operations of a group, which end when every member has called everything.

    Attributes:
        last: ends behind all others.
        buffers: that they use.
        scratch: int8 [1], whose contents nobody wants.
    """

    last: CclHandle
    buffers: tuple[Tensor, ...]
    scratch: Tensor


Warmup = Callable[[CclComm, int, int, Any], WarmupOps]
"""Begins a group, given this rank, the size and torch's device."""


class DeferredEvent(Protocol):
    """An event whose wait may come before its recording; both happen once at most."""

    def wait(self) -> None:
        """Make the current stream wait for the recording."""
        ...

    def record(self, stream: Any) -> None:
        """Put the point behind what `stream`, of the vendor's, was given."""
        ...


class Ccl(Protocol):
    """A library. Questions, and names of threads, begin with its name."""

    @property
    def name(self) -> str:
        """In small letters."""
        ...

    @property
    def title(self) -> str:
        """In errors."""
        ...

    @property
    def runtime(self) -> DeviceRuntime:
        """The binding of the devices that it is for."""
        ...

    @property
    def capabilities(self) -> CommunicatorCapabilities:
        """What it can do, as the environment sets it up; asked before every operation."""
        ...

    @property
    def one_at_a_time(self) -> bool:
        """Whether a rank must not take part in making two of its groups at once."""
        ...

    def probe(self) -> Probe:
        """Whether it can run here; never raises."""
        ...

    def device(self, rank: int) -> int:
        """The device that this process has opened, else the one that the rank's number gives it."""
        ...

    def capturing(self) -> bool:
        """Whether the calling thread's current stream is being captured."""
        ...

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise `Unsupported` for tensors whose bytes are not what their shape says."""
        ...

    def deferred_event(self, index: int) -> DeferredEvent:
        """For a stream of that device."""
        ...

    def release_stream(self, index: int) -> Any:
        """A stream of the vendor's on which nothing ever waits."""
        ...

    def estimate_bytes(self, link: bool) -> int:
        """Bytes of a device that a link, or a whole group, takes with today's settings."""
        ...

    def init_comm(
        self, spec: CommSpec, device: Device, bootstrap: Bootstrap, warmup: Warmup
    ) -> tuple[CclComm, WarmupOps]:
        """Make a group together with its members, all of which are about to call this.

        Blocks until they have; on a thread of its own. Raises RuntimeError, `ControlError` and
        `CommunicatorFailed`; nothing is left behind then.
        """
        ...
