"""Slots in device memory; every operation is a batch of byte copies on a stream."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from equipoise.backends.devices.event import DeviceEvent
from equipoise.backends.devices.issue_lock import DeviceStreamOp
from equipoise.backends.devices.memory import (
    check_reachable,
    is_pageable,
    record_stream_use,
    to_pinned,
)
from equipoise.backends.devices.runtime import Device
from equipoise.backends.devices.stream import DeviceStream, own_stream
from equipoise.hal.errors import SlotError
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Stream
from equipoise.hal.support.slot_access import (
    AttachedReader,
    HazardTracker,
    LeaseTable,
    ReaderRegistry,
    SlotLease,
)
from equipoise.hal.support.validation import (
    check_checksum_out,
    check_numbers,
    check_packed_blob,
    source_segments,
)


class ByteOps(Protocol):
    """How a vendor copies and checksums bytes: on the current stream, without blocking the host.
    All tensors are uint8 [n], but those of `words`."""

    def view(self, segment: Segment) -> Tensor:
        """The bytes of a segment, uint8 [type.nbytes], in place. Raises `SlotError`."""
        ...

    def words(self, part: Tensor) -> Tensor:
        """The same memory, as `copy` takes it at least cost to the host: for frequent copies."""
        ...

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy the second of each pair into the first, of equal size; no two pairs overlap. Each
        tensor is uint8, or what `words` returned."""
        ...

    def checksum_parts(self, parts: Sequence[Tensor], out: Tensor, stream: Stream) -> None:
        """Write `equipoise.hal.checksum` of the parts, back to back, into `out`, int64 []. `stream`
        is current."""
        ...


Buffer = tuple[str, int]
"""A slot or a staging buffer, by number."""


class DeviceSlotStore:
    """Slots as lists of byte views, staging as one block of uint8 [staging, slot_bytes].

    A private format is copied as the bytes that it stores, like anything else (clause A10).

    Blobs and sources may lie on the device or in host memory. A source in pageable host memory is
    read during the call, everything else when the stream gets there. The allocator keeps whatever
    an operation uses until the stream has passed, so the caller may drop it at once.

    Args:
        layout: the slots; their memory is the caller's.
        device: where the staging is made.
        byte_ops: copy and sum bytes there.
    """

    def __init__(self, layout: SlotLayout, device: Device, byte_ops: ByteOps) -> None:
        self._layout = layout
        self._device = device
        self._byte_ops = byte_ops
        self._slots = [[byte_ops.view(segment) for segment in slot] for slot in layout.slots]
        self._hazards = HazardTracker(DeviceEvent)
        self._readers = ReaderRegistry(DeviceEvent)
        self._leases = LeaseTable()
        self._seen_streams: set[DeviceStream] = set()
        self._staging, self._zeroed = _zeros(layout, device)
        # The thread that steps the model issues commits: what they copy is put together here.
        self._slot_words = [[byte_ops.words(view) for view in views] for views in self._slots]
        self._staging_words = [
            [byte_ops.words(part) for part, _ in self._pieces(row, 0)] for row in self._staging
        ]

    @property
    def layout(self) -> SlotLayout:
        """What the store was made from."""
        return self._layout

    def pack(self, slots: Sequence[int], blob: Tensor, stream: Stream) -> None:
        """Copy slots into a blob, back to back."""
        indices = self._valid_numbers(slots, "slot")
        rows = self._rows(blob, len(indices))
        check_reachable(blob, "the blob")
        pairs = [
            pair for n, row in zip(indices, rows, strict=True) for pair in self._pieces(row, n)
        ]

        def program() -> None:
            record_stream_use(stream, blob)
            self._byte_ops.copy(pairs)

        self._issue(program, stream, reads=_slots(indices))

    def unpack(self, blob: Tensor, staging: Sequence[int], stream: Stream) -> None:
        """Copy a blob into staging buffers."""
        indices = self._valid_numbers(staging, "staging")
        check_packed_blob(self._layout, blob, len(indices))
        source = self._as_pinned(blob)
        rows = self._rows(source, len(indices))
        pairs = [(self._staging[n], row) for n, row in zip(indices, rows, strict=True)]

        def program() -> None:
            record_stream_use(stream, source)
            self._byte_ops.copy(pairs)

        self._issue(program, stream, writes=_staging(indices))

    def write(
        self, slots: Sequence[int], sources: Sequence[Sequence[Tensor]], stream: Stream
    ) -> None:
        """Fill slots from tensors that match the descriptor."""
        indices = self._valid_numbers(slots, "slot")
        if len(indices) != len(sources):
            raise SlotError(f"{len(indices)} slots, but sources for {len(sources)}")
        blocks = [source_segments(self._layout, source) for source in sources]
        segments = [segment for block in blocks for segment in block]
        views = [view for slot in indices for view in self._slots[slot]]
        pieces = [self._as_pinned(self._byte_ops.view(segment)) for segment in segments]
        pairs = list(zip(views, pieces, strict=True))

        def program() -> None:
            record_stream_use(stream, *(segment.data for segment in segments))
            self._byte_ops.copy(pairs)

        self._issue_write(program, stream, indices)

    def commit(self, copies: Sequence[tuple[int, int]], stream: Stream) -> None:
        """Copy staging buffers into slots, in place."""
        buffers = self._valid_numbers([staging for staging, _ in copies], "staging")
        indices = self._valid_numbers([slot for _, slot in copies], "slot")
        pairs = [
            pair
            for staging, slot in zip(buffers, indices, strict=True)
            for pair in zip(self._slot_words[slot], self._staging_words[staging], strict=True)
        ]
        self._issue_write(
            lambda: self._byte_ops.copy(pairs), stream, indices, reads=_staging(buffers)
        )

    def checksum_slots(self, slots: Sequence[int], out: Tensor, stream: Stream) -> None:
        """Checksum of each slot's bytes, segments back to back."""
        indices = self._valid_numbers(slots, "slot")
        self._check_sums(out, len(indices))

        def program() -> None:
            record_stream_use(stream, out)
            for place, slot in enumerate(indices):
                self._byte_ops.checksum_parts(self._slots[slot], out[place], stream)

        self._issue(program, stream, reads=_slots(indices))

    def checksum_staging(self, staging: Sequence[int], out: Tensor, stream: Stream) -> None:
        """Checksum of each staging buffer."""
        indices = self._valid_numbers(staging, "staging")
        self._check_sums(out, len(indices))

        def program() -> None:
            record_stream_use(stream, out)
            for place, buffer in enumerate(indices):
                self._byte_ops.checksum_parts([self._staging[buffer]], out[place], stream)

        self._issue(program, stream, reads=_staging(indices))

    def attach(self, stream: Stream) -> AttachedReader:
        """From now on commits and writes respect what is launched on `stream`."""
        return self._readers.attach(own_stream(stream))

    def lease(self, slots: Sequence[int]) -> SlotLease:
        """Hold slots against commits and writes."""
        return self._leases.acquire(self._valid_numbers(slots, "slot"))

    @property
    def conversions(self) -> int:
        """None: everything here is a copy of bytes."""
        return 0

    def _issue(
        self,
        program: Callable[[], object],
        stream: Stream,
        *,
        reads: Iterable[Buffer] = (),
        writes: Iterable[Buffer] = (),
    ) -> None:
        """Issue after the earlier operations that touch the same buffers (clause V5)."""
        read_slots, written_slots = tuple(reads), tuple(writes)

        @contextmanager
        def around(on: Stream) -> Iterator[None]:
            self._register_stream(own_stream(on))
            with self._hazards.track(on, reads=read_slots, writes=written_slots):
                yield

        own_stream(stream).issue(DeviceStreamOp(lambda _: program(), scope=around))

    def _issue_write(
        self,
        program: Callable[[], object],
        stream: Stream,
        slots: tuple[int, ...],
        reads: Iterable[Buffer] = (),
    ) -> None:
        """Issue an operation that writes slots: readers see all of it or nothing (A11), and leases
        forbid it (A12)."""
        read_slots, written_slots = tuple(reads), _slots(slots)

        @contextmanager
        def around(on: Stream) -> Iterator[None]:
            self._register_stream(own_stream(on))
            with self._hazards.track(on, reads=read_slots, writes=written_slots) as end_event:
                readers = self._readers.wait_for_readers(on)
                yield
            self._readers.resume_readers(readers, end_event)

        op = DeviceStreamOp(lambda _: program(), lambda: self._leases.exclude_leased(slots), around)
        own_stream(stream).issue(op)

    def _register_stream(self, stream: DeviceStream) -> None:
        """Make a stream wait for the zeroing of the staging, and record that it uses this memory.

        Once per stream is enough: the allocator asks the stream when the memory is freed.
        """
        if stream not in self._seen_streams:
            stream.wait(self._zeroed)
            slots = (segment.data for slot in self._layout.slots for segment in slot)
            record_stream_use(stream, self._staging, *slots)
            self._seen_streams.add(stream)

    def _pieces(self, row: Tensor, slot: int) -> list[tuple[Tensor, Tensor]]:
        """Pairs of (part of a packed row, segment of the slot)."""
        views = self._slots[slot]
        parts = torch.split(row, [view.numel() for view in views])
        return list(zip(parts, views, strict=True))

    def _rows(self, blob: Tensor, count: int) -> list[Tensor]:
        check_packed_blob(self._layout, blob, count)
        return list(blob.view(count, self._layout.slot_bytes))

    def _as_pinned(self, source: Tensor) -> Tensor:
        """Memory that a copy may read later on its stream; also works during a capture."""
        if not is_pageable(source):
            return source
        with self._device.runtime.allowed_in_capture():
            return to_pinned(source)

    def _valid_numbers(self, indices: Sequence[int], kind: str) -> tuple[int, ...]:
        return check_numbers(
            indices, len(self._slots) if kind == "slot" else self._layout.staging, kind
        )

    def _check_sums(self, out: Tensor, count: int) -> None:
        check_checksum_out(out, count)
        check_reachable(out, "the checksums")


def _zeros(layout: SlotLayout, device: Device) -> tuple[Tensor, DeviceEvent]:
    """The staging buffers, and an event after their zeroing, which runs on the current stream."""
    shape, born = (layout.staging, layout.slot_bytes), DeviceEvent()
    staging = torch.zeros(shape, dtype=torch.uint8, device=device.torch)
    born.start_recording(device).record(device.runtime.current_stream(device.index))
    return staging, born


def _slots(indices: Iterable[int]) -> tuple[Buffer, ...]:
    return tuple(("slot", index) for index in indices)


def _staging(indices: Iterable[int]) -> tuple[Buffer, ...]:
    return tuple(("staging", index) for index in indices)
