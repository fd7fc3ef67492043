"""The interface of a collective communication library (CCL), which NCCL and HCCL implement.

Tensors reach a library as bytes, or as numbers for sums, on the communicator's device.
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
"""Dtypes that can be transferred: any, since data that is only moved travels as int8."""
INTEGER_SUM_DTYPES = frozenset({torch.int32, torch.int64})
FLOAT_SUM_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""Dtypes that can be summed: integers always exactly, floats only where the library adds in a fixed
order (D1)."""


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor as int8 [nbytes], an element type that every library has."""
    return tensor.detach().view(-1).view(torch.int8)


def check_device(device: Device, tensors: Sequence[Tensor]) -> None:
    """All on the communicator's own device. Raises `Unsupported`."""
    for tensor in tensors:
        if tensor.device.index != device.index:
            raise Unsupported(f"a tensor on {device.torch} is needed, got {tensor.device}")


@dataclass(frozen=True)
class CommSpec:
    """The name, members and deadline of a communicator of the library.

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
        """The same for another attempt: a library must not see one name twice."""
        return replace(self, name=f"{self.name}/attempt{attempt}")


class CclHandle(Protocol):
    """An operation that was launched. No method blocks the host."""

    def block_stream(self) -> None:
        """Make the current stream wait for the end."""
        ...

    def is_complete(self) -> bool:
        """Whether the device has finished the operation. Raises RuntimeError after an error."""
        ...

    def error(self) -> str:
        """The error that the library reports of the communicator; empty if there is none."""
        ...


class CclComm(Protocol):
    """A communicator of the library. Tensors are contiguous, on the device, and not empty.

    Each operation waits for the current stream, and runs on the communicator's own stream, in the
    order of the calls. Errors are RuntimeErrors. Not thread-safe, except for `abort`, `closed` and
    the handles.
    """

    @property
    def stream(self) -> Any:
        """The vendor's stream that it runs on, and that nothing else uses."""
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
        """Exchange bytes, int8; `receives` and `sends` are counts per rank, empty for even
        parts."""
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
        """End what is in flight and release the communicator, without the other members.

        Starts that and returns at once. Called at most once, from any thread, and only if the
        library can abort.
        """
        ...

    def close(self) -> None:
        """Release it; nothing is in flight on any member. Starts that and returns at once."""
        ...

    @property
    def closed(self) -> bool:
        """Whether it has been released."""
        ...


@dataclass(frozen=True)
class WarmupOps:
    """The warm-up operations of a communicator, which end when every member has called all of them.

    Attributes:
        last: ends after all others.
        buffers: that they use.
        scratch: int8 [1], whose contents do not matter.
    """

    last: CclHandle
    buffers: tuple[Tensor, ...]
    scratch: Tensor


Warmup = Callable[[CclComm, int, int, Any], WarmupOps]
"""Launches the warm-up, from the communicator, this rank, the size and torch's device."""


class DeferredEvent(Protocol):
    """An event that a stream can wait for before it is recorded; each happens at most once."""

    def wait(self) -> None:
        """Make the current stream wait for the recording."""
        ...

    def record(self, stream: Any) -> None:
        """Record after everything launched so far on `stream`, a stream of the vendor's."""
        ...


class Ccl(Protocol):
    """A collective communication library. Its name is the prefix of store keys and thread names."""

    @property
    def name(self) -> str:
        """Name in small letters."""
        ...

    @property
    def title(self) -> str:
        """Name in error messages."""
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
        """Whether a rank may take part in making only one communicator at a time."""
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
        """A new one, for a stream of that device."""
        ...

    def release_stream(self, index: int) -> Any:
        """A stream of the vendor's on which nothing ever waits, to record deferred events on."""
        ...

    def estimate_bytes(self, link: bool) -> int:
        """Device memory in bytes that a link, or a whole group, takes with the current settings."""
        ...

    def init_comm(
        self, spec: CommSpec, device: Device, bootstrap: Bootstrap, warmup: Warmup
    ) -> tuple[CclComm, WarmupOps]:
        """Make a communicator together with the other members, all of which are about to call this.

        Blocks until they have; called on a thread of its own. Raises RuntimeError, `ControlError`
        and `CommunicatorFailed`, and leaves nothing behind then.
        """
        ...
