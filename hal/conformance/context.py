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
from equipoise.hal.slots import Segment
from equipoise.hal.stream import Stream
from equipoise.hal.work import Work

GUARD_BYTES = 64
"""Bytes of a guard band on either side."""
GUARD_FILL = 0x5A


@dataclass(frozen=True)
class Until:
    """What a host waits for when it yields: on a controlled world it is not resumed before.

    Attributes:
        ready: whether it may go on; must have no side effect.
        what: in words, for the report of a hang.
    """

    ready: Callable[[], bool]
    what: str


NEXT = Until(lambda: True, "its next step")
"""Anybody may overtake here, nothing is waited for."""
RANK_ENDED = Until(lambda: False, "nothing: its rank has ended")
"""What a host yields last when its rank has ended; it is never resumed."""
PAUSE_YIELDS = 16
"""How often a host that pauses lets others overtake, where there is no clock."""
PAUSE_FRACTION = 0.25
"""The part of the deadline that a rank pauses for."""
Play = Generator[Until, None, Any]
"""A host that plays its part: yields what it waits for, returns what it observed (JSON)."""


class Termination(StrEnum):
    """How a rank ends."""

    KILL = "kill"
    """At once, as by SIGKILL; the launcher notices and tells the others."""
    STOP = "stop"
    """Nothing of it moves any more, as by SIGSTOP; nobody is told."""


class Environment(Protocol):
    """What only the executor can do for a bench."""

    def empty(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] in device memory, contents undefined."""
        ...

    def empty_private(self, elements: int, dtype: torch.dtype, padding: int) -> Tensor:
        """Device memory in a private format, contents undefined.

        So many elements, and where the format leaves that open so many bytes of padding.
        """
        ...

    def storage_bytes(self, tensor: Tensor) -> Tensor:
        """What such a tensor stores, padding included, as bytes over the same memory."""
        ...

    def scribble_freed_memory(self) -> None:
        """Let memory that was dropped be reused and scribbled."""
        ...

    def hold(self, stream: Stream) -> Callable[[], None]:
        """Keep `stream` from running what is launched from now on, until the result is called.

        Raises `Unsupported` where nothing can hold a stream.
        """
        ...

    def inject_delay(self, stream: Stream) -> None:
        """Let a delay of the executor's choice happen on `stream`, to widen races."""
        ...

    def open(self, purpose: str, ranks: Sequence[int] | None) -> Communicator:
        """A fresh communicator whose purpose no earlier case has used."""
        ...

    def leftovers(self) -> Mapping[str, int]:
        """What is not given back yet, by name; only equal names can be compared (R1)."""
        ...

    def end_rank(self, how: Termination) -> None:
        """End this rank, for good. Only where `Traits.expendable`."""
        ...

    def lose_store(self, how: Termination) -> None:
        """End the store of the control plane, or what is left of it; it does not answer any more.

        Only where `Traits.expendable`, for a property that `takes_store`.
        """
        ...

    def pause(self, seconds: float) -> None:
        """Let nothing of this rank move for so long."""
        ...


@dataclass
class RankContext:
    """One host's place: its rank, its device, its fabric.

    Attributes:
        rank: this rank.
        size: ranks that play.
        thread: which host of the rank this is.
        backend: what the device was opened by.
        accelerator: the device, shared by the rank's hosts.
        fabric: this rank's connection to the others; absent in programs of one rank.
        deadline: seconds after which an operation of this fabric fails.
        timeout: seconds that any wait which must succeed may take.
        environment: the executor's part.
        shared: what the hosts of this rank share.
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
        """Let memory that was dropped be reused and scribbled."""
        self.environment.scribble_freed_memory()

    def hold(self, stream: Stream) -> Callable[[], None]:
        """Keep `stream` from running what is launched from now on; the result lets it go."""
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
    """A buffer inside a larger one, whose other bytes nobody may touch."""

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


def sync_current_stream(made: Tensor) -> Tensor:
    """The tensor once it holds what it was filled with, whatever stream uses it next.

    Waits for the stream that filled it, the calling thread's current one, and for no other:
    another may wait for the host.
    """
    if made.device.type != "cpu":
        native_stream(made.device).synchronize()
    return made


def native_stream(device: torch.device) -> Any:
    """The stream of the device's own library that the calling thread launches on."""
    return torch.get_device_module(device).current_stream(device)


def to_host(held: Tensor) -> Tensor:
    """What a tensor holds, on the host, read at once: comparing costs a launch on a device.

    Only for what has ended: a drained stream, a work whose result has returned.
    """
    if held.device.type == "cpu":
        return held.detach()
    flat = held.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return flat.view(held.dtype).view(held.shape)


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


def require_equal(clause: str, found: Tensor, wanted: Tensor, what: str) -> None:
    """Raise `Violation` unless both hold the same bytes; says where they differ first."""
    left, right = (
        to_host(tensor).contiguous().reshape(-1).view(torch.uint8) for tensor in (found, wanted)
    )
    if left.shape != right.shape:
        raise Violation(clause, f"{what}: {left.numel()} bytes instead of {right.numel()}")
    wrong = (left != right).nonzero()
    if wrong.numel():
        place = int(wrong[0])
        seen, expected = int(left[place]), int(right[place])
        count = f"{wrong.numel()} of {left.numel()} bytes differ"
        raise Violation(
            clause, f"{what}: {count}, first at {place}: {seen:#04x}, not {expected:#04x}"
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
    """Wait until every rank has come to this point; to be used with `yield from`."""
    control_plane(ctx).cast(point, b"here")
    yield from gather_ballots(ctx, point)


JUNK_BYTE = 0x3C


def occupy_freed_memory(ctx: RankContext, *dropped: int) -> list[Tensor]:
    """Buffers of these sizes (bytes): they take the memory of what was dropped, if it is free."""
    ctx.scribble_freed_memory()
    return [ctx.full((nbytes,), JUNK_BYTE) for nbytes in dropped]


def require_junk_untouched(clause: str, junk: list[Tensor]) -> None:
    """Demand that nobody has written to memory that was not his any more."""
    for buffer in junk:
        late = int((to_host(buffer) != JUNK_BYTE).sum())
        require(clause, late == 0, f"{late} bytes written to memory that was freed in flight")
