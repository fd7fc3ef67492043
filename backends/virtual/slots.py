"""Slots of the virtual device. Each copy is made in pieces, so that a reader that does not wait
sees them torn."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from equipoise import _native
from equipoise.backends.virtual.arena import Bytes, bytes_of
from equipoise.backends.virtual.scheduling import in_turn
from equipoise.backends.virtual.stream import VirtualStream, VirtualStreamOp, own_stream
from equipoise.hal.checksum import as_int64
from equipoise.hal.errors import SlotError, Unsupported
from equipoise.hal.slots import SlotLayout
from equipoise.hal.stream import Stream
from equipoise.hal.support.slot_access import AttachedReader, SlotLease
from equipoise.hal.support.validation import (
    check_checksum_out,
    check_numbers,
    check_packed_blob,
    source_segments,
)

if TYPE_CHECKING:
    from equipoise.backends.virtual.device import VirtualDevice

Buffer = tuple[str, int]
"""A slot or a staging buffer, by number."""
Copy = tuple[Bytes, Bytes]
"""Where to, where from; both uint8 [n]."""


class VirtualSlotStore:
    """Slots as lists of byte views; staging as rows uint8 [slot_bytes] of the arena.

    The view of a private segment is its whole storage, whatever its tensor shows (clause A10).

    Every operation checks its arguments at the call; only the bytes wait for the stream.
    """

    def __init__(self, device: "VirtualDevice", layout: SlotLayout) -> None:
        for segment_spec in layout.descriptor:
            if segment_spec.format not in device.declared.slot_formats:
                raise Unsupported(
                    f"segment {segment_spec.name!r}: no {segment_spec.format} format here"
                )
        self._device = device
        self._layout = layout
        self._slots = [[bytes_of(segment.bytes) for segment in slot] for slot in layout.slots]
        self._staging = [
            bytes_of(device.arena.empty(layout.slot_bytes)) for _ in range(layout.staging)
        ]
        self._hazards = device.parts.hazards(device.event)
        self._readers = device.parts.readers(device.event)
        self._leases = device.parts.leases()

    @property
    def layout(self) -> SlotLayout:
        """What the store was made from."""
        return self._layout

    def pack(self, slots: Sequence[int], blob: Tensor, stream: Stream) -> None:
        """Copy slots into a blob, back to back."""
        indices = self._valid_numbers(slots, len(self._slots), "slot")
        rows = self._rows(blob, len(indices))

        def steps() -> Iterator[None]:
            pairs = zip(rows, indices, strict=True)
            return self._perform([c for row, slot in pairs for c in self._gather(row, slot)])

        self._issue(steps, stream, reads=_slots(indices))

    def unpack(self, blob: Tensor, staging: Sequence[int], stream: Stream) -> None:
        """Copy a blob into staging buffers."""
        indices = self._valid_numbers(staging, len(self._staging), "staging")
        rows = self._rows(blob, len(indices))

        def steps() -> Iterator[None]:
            pairs = zip(rows, indices, strict=True)
            return self._perform([(self._staging[buffer], row) for row, buffer in pairs])

        self._issue(steps, stream, writes=_staging(indices))

    def write(
        self, slots: Sequence[int], sources: Sequence[Sequence[Tensor]], stream: Stream
    ) -> None:
        """Fill slots from tensors that match the descriptor."""
        indices = self._valid_numbers(slots, len(self._slots), "slot")
        if len(indices) != len(sources):
            raise SlotError(f"{len(indices)} slots, but sources for {len(sources)}")
        blocks = [self._source(source) for source in sources]

        def steps() -> Iterator[None]:
            pairs = zip(indices, blocks, strict=True)
            return self._perform(
                [c for slot, block in pairs for c in zip(self._slots[slot], block, strict=True)]
            )

        self._issue_write(steps, stream, indices)

    def commit(self, copies: Sequence[tuple[int, int]], stream: Stream) -> None:
        """Copy staging buffers into slots, in place."""
        buffers = self._valid_numbers(
            [staging for staging, _ in copies], len(self._staging), "staging"
        )
        indices = self._valid_numbers([slot for _, slot in copies], len(self._slots), "slot")

        def steps() -> Iterator[None]:
            pairs = zip(buffers, indices, strict=True)
            return self._perform(
                [c for buffer, slot in pairs for c in self._scatter(self._staging[buffer], slot)]
            )

        self._issue_write(steps, stream, indices, reads=_staging(buffers))

    def checksum_slots(self, slots: Sequence[int], out: Tensor, stream: Stream) -> None:
        """Checksum of each slot's bytes, segments back to back."""
        indices = self._valid_numbers(slots, len(self._slots), "slot")
        check_checksum_out(out, len(indices))

        def steps() -> Iterator[None]:
            for place, slot in enumerate(indices):
                scratch = np.empty(self._layout.slot_bytes, np.uint8)
                yield from self._perform(self._gather(scratch, slot))
                self._sum(scratch, out, place)

        self._issue(steps, stream, reads=_slots(indices))

    def checksum_staging(self, staging: Sequence[int], out: Tensor, stream: Stream) -> None:
        """Checksum of each staging buffer."""
        indices = self._valid_numbers(staging, len(self._staging), "staging")
        check_checksum_out(out, len(indices))

        def steps() -> Iterator[None]:
            for place, buffer in enumerate(indices):
                scratch = np.empty(self._layout.slot_bytes, np.uint8)
                yield from self._perform([(scratch, self._staging[buffer])])
                self._sum(scratch, out, place)

        self._issue(steps, stream, reads=_staging(indices))

    def attach(self, stream: Stream) -> AttachedReader:
        """From now on commits and writes respect what is launched on `stream`."""
        return self._readers.attach(own_stream(stream))

    def lease(self, slots: Sequence[int]) -> SlotLease:
        """Hold slots against commits and writes."""
        return self._leases.acquire(self._valid_numbers(slots, len(self._slots), "slot"))

    @property
    def conversions(self) -> int:
        """None: everything here is a copy of bytes (clause A7)."""
        return 0

    def _issue(
        self,
        steps: Callable[[], Iterator[None]],
        stream: Stream,
        *,
        reads: Iterable[Buffer] = (),
        writes: Iterable[Buffer] = (),
    ) -> None:
        """Launch after the earlier operations that touch the same buffers (clause V5)."""

        def issue(on: VirtualStream) -> None:
            with self._hazards.track(on, reads=reads, writes=writes):
                on.perform(steps)

        own_stream(stream).issue(VirtualStreamOp(issue))

    def _issue_write(
        self,
        steps: Callable[[], Iterator[None]],
        stream: Stream,
        slots: tuple[int, ...],
        reads: Iterable[Buffer] = (),
    ) -> None:
        """The same for what writes slots: readers see it whole, leases forbid it (A11, A12)."""

        def issue(on: VirtualStream) -> None:
            with self._hazards.track(on, reads=reads, writes=_slots(slots)) as end_event:
                readers = self._readers.wait_for_readers(on)
                on.perform(steps)
            self._readers.resume_readers(readers, end_event)

        own_stream(stream).issue(VirtualStreamOp(issue, lambda: self._leases.exclude_leased(slots)))

    def _perform(self, copies: Sequence[Copy]) -> Iterator[None]:
        """The copies in turn, each in pieces; others may come between any two."""
        return in_turn(
            partial(self._copy, into, source, part)
            for into, source in copies
            for part in self._cut(len(into))
        )

    def _copy(self, into: Bytes, source: Bytes, part: slice) -> None:
        """One piece of a copy."""
        into[part] = source[part]

    def _cut(self, length: int) -> tuple[slice, ...]:
        """The pieces of a copy of so many bytes."""
        half = (length + 1) // 2
        return slice(0, half), slice(half, length)

    def _gather(self, row: Bytes, slot: int) -> list[Copy]:
        """What brings a slot's segments into one row."""
        return [(part, segment) for part, segment in self._pieces(row, slot)]

    def _scatter(self, row: Bytes, slot: int) -> list[Copy]:
        """What brings a row into a slot's segments."""
        return [(segment, part) for part, segment in self._pieces(row, slot)]

    def _pieces(self, row: Bytes, slot: int) -> Iterator[tuple[Bytes, Bytes]]:
        """Pairs of (part of a packed row, segment of the slot)."""
        start = 0
        for segment in self._slots[slot]:
            yield row[start : start + len(segment)], segment
            start += len(segment)

    def _rows(self, blob: Tensor, count: int) -> list[Bytes]:
        check_packed_blob(self._layout, blob, count)
        return list(bytes_of(blob).reshape(count, self._layout.slot_bytes))

    def _valid_numbers(self, indices: Sequence[int], limit: int, kind: str) -> tuple[int, ...]:
        return check_numbers(indices, limit, kind)

    def _source(self, source: Sequence[Tensor]) -> list[Bytes]:
        return [bytes_of(segment.bytes) for segment in source_segments(self._layout, source)]

    def _sum(self, row: Bytes, out: Tensor, place: int) -> None:
        out[place] = as_int64(_native.checksum(row))


def _slots(indices: Iterable[int]) -> tuple[Buffer, ...]:
    return tuple(("slot", index) for index in indices)


def _staging(indices: Iterable[int]) -> tuple[Buffer, ...]:
    return tuple(("staging", index) for index in indices)
