"""What the code of a property works with: its rank, device and fabric, waiting, and checks.

A check names the clause that it judges. `Play` is the generator that an executor runs: it yields
each condition that it waits for, so that a controlled world can choose every interleaving.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import Tensor

from equipoise.hal.accelerator import Accelerator, Backend
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.communicator import Communicator, Fabric
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import BallotIncomplete, EquipoiseError, Unsupported, Violation
from equipoise.hal.expert_parallel import ExpertParallelLibrary
from equipoise.hal.slots import Segment
from equipoise.hal.stream import Stream
from equipoise.hal.work import Work

GUARD_BYTES = 64
"""Bytes of a guard band on either side."""
GUARD_FILL = 0x5A


@dataclass(frozen=True)
class Until:
    """What a thread waits for when it yields: a controlled world resumes it no earlier.

    Attributes:
        ready: whether the thread may continue; must have no side effect.
        what: description, for the report of a hang.
    """

    ready: Callable[[], bool]
    what: str


NEXT = Until(lambda: True, "its next step")
"""Other threads may overtake here; nothing is waited for."""
RANK_ENDED = Until(lambda: False, "nothing: its rank has ended")
"""What a thread yields last when its rank has ended; it is never resumed."""
PAUSE_YIELDS = 16
"""How often a thread that pauses yields, where there is no clock."""
PAUSE_FRACTION = 0.25
"""The part of the deadline that a rank pauses for."""
Play = Generator[Until, None, Any]
"""A thread that plays a program: yields what it waits for, returns what it observed (JSON)."""


class Termination(StrEnum):
    """How a rank ends."""

    KILL = "kill"
    """At once, as by SIGKILL; the launcher notices and reports the loss."""
    STOP = "stop"
    """All its threads stop, as by SIGSTOP; no rank is notified."""


class Environment(Protocol):
    """What only the executor can do for a rank context."""

    def empty(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] in device memory, contents undefined."""
        ...

    def empty_private(self, elements: int, dtype: torch.dtype, padding: int) -> Tensor:
        """Device memory in a private format, contents undefined.

        `padding` is used where the format does not determine it.
        """
        ...

    def storage_bytes(self, tensor: Tensor) -> Tensor:
        """What such a tensor stores, padding included, as bytes of the same memory."""
        ...

    def scribble_freed_memory(self) -> None:
        """Reuse and overwrite memory that was dropped."""
        ...

    def hold(self, stream: Stream) -> Callable[[], None]:
        """Keep `stream` from running later launches until the returned function is called.

        Raises `Unsupported` where nothing can hold a stream.
        """
        ...

    def inject_delay(self, stream: Stream) -> None:
        """Insert a delay on `stream`, to widen races; the executor chooses its length."""
        ...

    def open(self, purpose: str, ranks: Sequence[int] | None) -> Communicator:
        """Open a communicator whose purpose no earlier case has used."""
        ...

    def close(self, communicator: Communicator) -> None:
        """Close it. On ranks an error is reported beside what the case shows (E5)."""
        ...

    def fresh_purpose(self, purpose: str) -> str:
        """The purpose under a name that no earlier case has used."""
        ...

    def leftovers(self) -> Mapping[str, int]:
        """Resources that are not released yet, by name; only equal names can be compared (R1)."""
        ...

    def end_rank(self, how: Termination) -> None:
        """End this rank for good. Only where `Traits.can_end_ranks`."""
        ...

    def lose_store(self, how: Termination) -> None:
        """End the store of the control plane: it stops answering.

        Only where `Traits.can_end_ranks`, for a property that `ends_store`.
        """
        ...

    def pause(self, seconds: float) -> None:
        """Stop all threads of this rank for that long."""
        ...


@dataclass
class RankContext:
    """What one thread of a rank works with: its rank, device and fabric.

    Attributes:
        rank: this rank.
        size: ranks that play.
        thread: number of the thread within the rank.
        backend: what the device was opened by.
        accelerator: the device, shared by the rank's threads.
        fabric: this rank's connection to the others; absent in programs of one rank.
        deadline: seconds after which an operation of this fabric fails.
        timeout: seconds that any wait which must succeed may take.
        environment: the executor's part.
        shared: what the threads of this rank share.
        library: the expert-parallel library that is judged, if one is.
    """

    rank: int
    size: int
    thread: int
    backend: Backend
    accelerator: Accelerator
    fabric: Fabric | None
    deadline: float
    timeout: float
    environment: Environment
    shared: dict[str, Any] = field(default_factory=dict)
    library: ExpertParallelLibrary | None = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor:
        """Device memory of that shape and dtype, contents undefined."""
        count = 1
        for extent in shape:
            count *= extent
        flat = self.environment.empty(count * dtype.itemsize)
        return flat.view(dtype).view(tuple(shape))

    def copy_of(self, values: Tensor) -> Tensor:
        """Device memory with a copy of `values`."""
        return sync_current_stream(self.empty(tuple(values.shape), values.dtype).copy_(values))

    def full(self, shape: Sequence[int], value: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Device memory filled with `value`."""
        return sync_current_stream(self.empty(shape, dtype).fill_(value))

    def guarded_buffer(self, nbytes: int, offset: int = 0) -> "GuardedBuffer":
        """Bytes between guard bands; `offset` moves them off the alignment."""
        whole = self.full((GUARD_BYTES + offset + nbytes + GUARD_BYTES,), GUARD_FILL)
        return GuardedBuffer(whole, GUARD_BYTES + offset, nbytes)

    def empty_private(self, elements: int, dtype: torch.dtype, padding: int) -> Tensor:
        """Device memory in a private format, contents undefined."""
        return self.environment.empty_private(elements, dtype, padding)

    def storage_bytes(self, segment: Segment) -> Tensor:
        """What a copy of the segment takes, uint8 [type.nbytes], over the same memory."""
        if segment.format is SlotFormat.PRIVATE:
            return self.environment.storage_bytes(segment.data)
        return segment.bytes

    def scribble_freed_memory(self) -> None:
        """Reuse and overwrite memory that was dropped."""
        self.environment.scribble_freed_memory()

    def hold(self, stream: Stream) -> Callable[[], None]:
        """Keep `stream` from running later launches; returns a function that releases it."""
        return self.environment.hold(stream)

    def inject_delay(self, stream: Stream) -> None:
        """Widen races on `stream`, where that is possible."""
        self.environment.inject_delay(stream)

    def communicator(self, purpose: str = "main", ranks: Sequence[int] | None = None) -> Play:
        """A fresh communicator; to be used with `yield from`."""
        yield NEXT
        return self.environment.open(purpose, ranks)

    def end_rank(self, how: Termination) -> Play:
        """End this rank; to be used with `yield from`, which never returns."""
        self.environment.end_rank(how)
        yield RANK_ENDED

    def pause(self) -> Play:
        """Let the others go ahead for less than the deadline; to be used with `yield from`."""
        self.environment.pause(PAUSE_FRACTION * self.deadline)
        for _ in range(PAUSE_YIELDS):
            yield NEXT

    def drain(self, *streams: Stream) -> None:
        """Wait, on the host, for these streams, or for all of the accelerator's."""
        for stream in streams:
            stream.synchronize(self.timeout)
        if not streams:
            self.accelerator.synchronize(self.timeout)


@dataclass(frozen=True)
class GuardedBuffer:
    """A buffer inside a larger one, whose other bytes must not be touched."""

    whole: Tensor
    start: int
    nbytes: int

    @property
    def data(self) -> Tensor:
        """uint8 [nbytes]."""
        return self.whole[self.start : self.start + self.nbytes]

    def guards_intact(self) -> bool:
        """Whether the guard bands still hold what was put there."""
        whole = to_host(self.whole)
        before, after = whole[: self.start], whole[self.start + self.nbytes :]
        return bool((before == GUARD_FILL).all()) and bool((after == GUARD_FILL).all())


def sync_current_stream(tensor: Tensor) -> Tensor:
    """Wait until the tensor holds what it was filled with, so that any stream may use it next.

    Waits for the stream that filled it, the calling thread's current one, and for no other:
    another may wait for the host.
    """
    if tensor.device.type != "cpu":
        native_stream(tensor.device).synchronize()
    return tensor


def native_stream(device: torch.device) -> Any:
    """The stream of the device's own library that the calling thread launches on."""
    module = torch.get_device_module(device)
    if not hasattr(module, "current_stream"):  # a plug-in may leave it to torch
        return torch.accelerator.current_stream(device)
    return module.current_stream(device)


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host at once: comparing on the device would cost a launch.

    Only after its writers have ended: a drained stream, a work whose result has returned.
    """
    if tensor.device.type == "cpu":
        return tensor.detach()
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return flat.view(tensor.dtype).view(tensor.shape)


def wait_for_success(ctx: RankContext, work: Work, what: str = "an operation") -> Play:
    """Wait for a work that must end well; to be used with `yield from`."""
    yield Until(work.done, what)
    work.result(ctx.timeout)


def wait_for_outcome(ctx: RankContext, work: Work, what: str = "an operation") -> Play:
    """Wait for a work that may fail; returns the error, or None when it ended well."""
    yield Until(work.done, what)
    try:
        work.result(ctx.timeout)
    except EquipoiseError as error:
        return error
    return None


def catch(call: Callable[[], object], *allowed: type[Exception]) -> Exception | None:
    """The error of one of the `allowed` kinds that `call` raised, or None."""
    try:
        call()
    except allowed as error:
        return error
    return None


def require(clause: str, truth: object, what: str) -> None:
    """Raise `Violation` of `clause` unless `truth`."""
    if not truth:
        raise Violation(clause, what)


def require_equal(clause: str, actual: Tensor, expected: Tensor, what: str) -> None:
    """Raise `Violation` unless both hold the same bytes; says where they differ first."""
    left, right = (
        to_host(tensor).contiguous().reshape(-1).view(torch.uint8) for tensor in (actual, expected)
    )
    if left.shape != right.shape:
        raise Violation(clause, f"{what}: {left.numel()} bytes instead of {right.numel()}")
    wrong = (left != right).nonzero()
    if wrong.numel():
        place = int(wrong[0])
        actual_byte, expected_byte = int(left[place]), int(right[place])
        count = f"{wrong.numel()} of {left.numel()} bytes differ"
        raise Violation(
            clause,
            f"{what}: {count}, first at {place}: {actual_byte:#04x}, not {expected_byte:#04x}",
        )


def control_plane(ctx: RankContext) -> ControlPlane:
    """The rank's control plane. Raises `Unsupported` where there is no fabric."""
    if ctx.fabric is None:
        raise Unsupported("a device by itself has no control plane")
    return ctx.fabric.control


def gather_ballots(ctx: RankContext, question: str, ranks: Sequence[int] | None = None) -> Play:
    """Wait for all ballots, and return them; to be used with `yield from`."""
    control = control_plane(ctx)

    def complete() -> bool:
        try:
            control.collect(question, 0.0, ranks)
        except BallotIncomplete:
            return False
        return True

    yield Until(complete, f"ballots on {question!r}")
    return control.collect(question, ctx.timeout, ranks)


def control_barrier(ctx: RankContext, point: str) -> Play:
    """Wait until every rank has reached this point; to be used with `yield from`."""
    control_plane(ctx).cast(point, b"here")
    yield from gather_ballots(ctx, point)


JUNK_BYTE = 0x3C


def occupy_freed_memory(ctx: RankContext, *dropped: int) -> list[Tensor]:
    """Buffers of these sizes (bytes): they take the memory of what was dropped, if it is free."""
    ctx.scribble_freed_memory()
    return [ctx.full((nbytes,), JUNK_BYTE) for nbytes in dropped]


def require_junk_untouched(clause: str, junk: list[Tensor]) -> None:
    """Require that no operation has written to memory that was freed in flight."""
    for buffer in junk:
        late = int((to_host(buffer) != JUNK_BYTE).sum())
        require(clause, late == 0, f"{late} bytes written to memory that was freed in flight")
