"""Expert weights as slots, and the batched verbs that fill them.

A slot is a list of segments. Its addresses, shapes, dtypes and formats never change, so captured
graphs and kernels may keep pointers (clause A1). New weights arrive in *staging* and reach a slot
only by `commit`, which is ordered on the stream that reads the slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.errors import SlotError
from equipoise.hal.stream import Stream


@dataclass(frozen=True)
class SegmentType:
    """What two slots must share for their bytes to be interchangeable.

    Attributes:
        name: of the segment.
        shape: of its elements.
        dtype: of its elements.
        format: how its bytes are laid out.
        padding: bytes that a private format stores beyond those of its elements, wherever it keeps
            them; a strided segment has none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    format: SlotFormat = SlotFormat.STRIDED
    padding: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of one segment, as a copy takes them: padding included (clause A10)."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.dtype.itemsize + self.padding


@dataclass(frozen=True)
class Segment:
    """One tensor of a slot: a contiguous view, at any offset into its storage.

    A private format has offset 0 and a storage to itself, since it is copied with all of that.
    """

    name: str
    data: Tensor
    format: SlotFormat = SlotFormat.STRIDED

    def __post_init__(self) -> None:
        if not self.data.is_contiguous():
            raise SlotError(f"segment {self.name!r} of shape {tuple(self.data.shape)} is strided")
        if self.format is SlotFormat.PRIVATE and self.data.storage_offset() != 0:
            raise SlotError(f"segment {self.name!r}: a private format needs storage offset 0")

    @property
    def type(self) -> SegmentType:
        """The descriptor of this segment."""
        padding = 0
        if self.format is SlotFormat.PRIVATE:
            padding = self.data.untyped_storage().nbytes() - self.data.nbytes
        return SegmentType(self.name, tuple(self.data.shape), self.data.dtype, self.format, padding)

    @property
    def bytes(self) -> Tensor:
        """What a copy takes, uint8 [type.nbytes], over the same memory.

        The whole storage of a private format (clause A10), else the elements. Only for storage that
        torch can show as plain bytes; who keeps a layout with it copies by means of its own.
        """
        data = self.data.detach()
        if self.format is SlotFormat.PRIVATE:
            whole = torch.empty(0, dtype=torch.uint8, device=data.device)
            return whole.set_(data.untyped_storage())
        return data.reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class SlotLayout:
    """All slots of one rank, and how much staging to keep for them.

    Attributes:
        slots: segments by local slot number; every slot has the same descriptor.
        staging: how many staging buffers of that descriptor to hold.
    """

    slots: tuple[tuple[Segment, ...], ...]
    staging: int

    def __post_init__(self) -> None:
        if not self.slots:
            raise SlotError("a layout needs at least one slot")
        for number, slot in enumerate(self.slots):
            types = tuple(segment.type for segment in slot)
            if types != self.descriptor:
                raise SlotError(f"slot {number} is {types}, slot 0 is {self.descriptor}")

    @cached_property
    def descriptor(self) -> tuple[SegmentType, ...]:
        """Segment types of a slot, in order."""
        return tuple(segment.type for segment in self.slots[0])

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(segment.nbytes for segment in self.descriptor)


@runtime_checkable
class Reader(Protocol):
    """A stream whose own launches read the slots: a forward, a draft model, a replayed graph."""

    def detach(self) -> None:
        """It reads no more; what it has launched is still waited for. Any number of times."""
        ...


@runtime_checkable
class Lease(Protocol):
    """Slots that a peer reads: nobody writes them until it has acknowledged (A11)."""

    @property
    def slots(self) -> tuple[int, ...]:
        """What is held."""
        ...

    def release(self) -> None:
        """The peer has read. Any number of times; only the first counts."""
        ...


@runtime_checkable
class SlotStore(Protocol):
    """The slots of one rank; every verb takes many slots, is ordered on `stream`, and copies bytes.

    A blob is a contiguous uint8 tensor that holds slots back to back, segments in order. Verbs of
    one store take effect as if one after another in the order of issue, whatever streams they are
    issued on: each waits, on its stream, for the earlier ones that touch the same slots or
    staging (A2, V2). Towards launches that read slots directly, see `attach`.
    """

    @property
    def layout(self) -> SlotLayout:
        """What the store was made from."""
        ...

    def pack(self, slots: Sequence[int], blob: Tensor, stream: Stream) -> None:
        """Copy `slots` into `blob`, uint8 [len(slots) * slot_bytes]. Raises `SlotError`."""
        ...

    def unpack(self, blob: Tensor, staging: Sequence[int], stream: Stream) -> None:
        """Copy `blob`, uint8 [len(staging) * slot_bytes], into staging. Raises `SlotError`."""
        ...

    def write(
        self, slots: Sequence[int], sources: Sequence[Sequence[Tensor]], stream: Stream
    ) -> None:
        """Fill spare slots from tensors that match the descriptor.

        `sources[i]` are the segments for `slots[i]`. Raises `SlotError` before any side effect.
        """
        ...

    def commit(self, copies: Sequence[tuple[int, int]], stream: Stream) -> None:
        """Copy staging into slots, in place; `copies` are (staging, slot) pairs."""
        ...

    def checksum_slots(self, slots: Sequence[int], out: Tensor, stream: Stream) -> None:
        """Write `equipoise.hal.checksum` of each slot's bytes to `out`, int64 [len(slots)]."""
        ...

    def checksum_staging(self, staging: Sequence[int], out: Tensor, stream: Stream) -> None:
        """The same for staging buffers."""
        ...

    def attach(self, stream: Stream) -> Reader:
        """From now on `commit` and `write` respect what is launched on `stream` (A12, V4).

        A call of either comes, whole, after everything launched on the stream before it and
        before everything launched after it.
        """
        ...

    def lease(self, slots: Sequence[int]) -> Lease:
        """Hold slots: `commit` and `write` to any of them raise `SlotLeased` before any effect.

        Leases of a slot add up; it is free when the last of them is released.
        """
        ...

    @property
    def conversions(self) -> int:
        """How many segments were copied by anything slower than a copy of bytes (A7)."""
        ...
