"""Slots of expert weights, and the batched operations that fill them.

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
    """Descriptor of a segment: equal descriptors have interchangeable bytes.

    Attributes:
        name: of the segment.
        shape: of its elements.
        dtype: of its elements.
        format: how its bytes are laid out.
        padding: bytes that a private format stores besides its elements, wherever they are; a
            strided segment has none.
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

    A private format has offset 0 and its own storage, since the whole storage is copied.
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
        torch can view as bytes; a backend whose storage has more to it copies in its own way.
        """
        data = self.data.detach()
        if self.format is SlotFormat.PRIVATE:
            whole = torch.empty(0, dtype=torch.uint8, device=data.device)
            return whole.set_(data.untyped_storage())
        return data.reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class SlotLayout:
    """All slots of one rank, and the number of staging buffers for them.

    Attributes:
        slots: segments by local slot number; every slot has the same descriptor.
        staging: number of staging buffers of that descriptor.
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
    """A stream whose launches read the slots: a forward pass, a draft model, a replayed graph."""

    def detach(self) -> None:
        """End the reading; commits still wait for what was launched. May be called repeatedly."""
        ...


@runtime_checkable
class Lease(Protocol):
    """Slots that a peer reads: they may not be written until it has acknowledged (A11)."""

    @property
    def slots(self) -> tuple[int, ...]:
        """The leased slots."""
        ...

    def release(self) -> None:
        """End the lease: the peer has read. Calls after the first have no effect."""
        ...


@runtime_checkable
class SlotStore(Protocol):
    """The slots of one rank. Every operation takes many slots and copies bytes on `stream`.

    A blob is a contiguous uint8 tensor that holds slots back to back, segments in order. Operations
    of one store take effect as if one after another in the order of issue, whatever streams they
    are issued on: each waits, on its stream, for the earlier ones that touch the same slots or
    staging (A2, V2). For launches that read slots directly see `attach`.
    """

    @property
    def layout(self) -> SlotLayout:
        """The layout that the store was created with."""
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
        """Fill slots from tensors that match the descriptor.

        `sources[i]` are the segments for `slots[i]`. Raises `SlotError` before any side effect.
        """
        ...

    def commit(self, copies: Sequence[tuple[int, int]], stream: Stream) -> None:
        """Copy staging buffers into slots, in place; `copies` are (staging, slot) pairs."""
        ...

    def checksum_slots(self, slots: Sequence[int], out: Tensor, stream: Stream) -> None:
        """Write `equipoise.hal.checksum` of each slot's bytes to `out`, int64 [len(slots)]."""
        ...

    def checksum_staging(self, staging: Sequence[int], out: Tensor, stream: Stream) -> None:
        """As `checksum_slots`, for staging buffers."""
        ...

    def attach(self, stream: Stream) -> Reader:
        """Order `commit` and `write` against what is launched on `stream` (A12, V4).

        Each such call runs, whole, after everything launched on the stream before it and before
        everything launched after it.
        """
        ...

    def lease(self, slots: Sequence[int]) -> Lease:
        """Lease slots: `commit` and `write` to any of them raise `SlotLeased` before any effect.

        A slot may have several leases; it is free when the last is released.
        """
        ...

    @property
    def conversions(self) -> int:
        """Number of segments that were copied by anything slower than a copy of bytes (A7)."""
        ...
