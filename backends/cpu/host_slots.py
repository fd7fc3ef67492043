"""Slots in host memory; every operation is a batch of memory copies."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from equipoise.backends.cpu.stream import CpuEvent, CpuStream, CpuStreamOp, own_stream
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.checksum import as_int64, checksum
from equipoise.hal.errors import SlotError, Unsupported
from equipoise.hal.slots import SlotLayout
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

Buffer = tuple[str, int]
"""A slot or a staging buffer, by number."""


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, uint8 [nbytes], without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


class HostSlotStore:
    """Slots as lists of byte views, staging as one block of uint8 [staging, slot_bytes].

    Every operation checks and copies its arguments at the call; only the bytes wait for the stream.
    """

    def __init__(self, layout: SlotLayout) -> None:
        for device in layout.descriptor:
            if device.format is not SlotFormat.STRIDED:
                raise Unsupported(f"segment {device.name!r}: the CPU has no {device.format} format")
        self._layout = layout
        self._slots = [[_bytes(segment.data) for segment in slot] for slot in layout.slots]
        self._sizes = [device.nbytes for device in layout.descriptor]
        self._staging = torch.zeros((layout.staging, layout.slot_bytes), dtype=torch.uint8)
        self._staged = [self._parts(row) for row in self._staging]
        self._hazards = HazardTracker(CpuEvent)
        self._readers = ReaderRegistry(CpuEvent)
        self._leases = LeaseTable()

    @property
    def layout(self) -> SlotLayout:
        """What the store was made from."""
        return self._layout

    def pack(self, slots: Sequence[int], blob: Tensor, stream: Stream) -> None:
        """Copy slots into a blob, back to back."""
        indices = self._valid_numbers(slots, "slot")
        rows = self._rows(blob, len(indices))

        def program() -> None:
            for row, slot in zip(rows, indices, strict=True):
                for piece, segment in zip(self._parts(row), self._slots[slot], strict=True):
                    piece.copy_(segment)

        self._issue(program, stream, reads=_slots(indices))

    def unpack(self, blob: Tensor, staging: Sequence[int], stream: Stream) -> None:
        """Copy a blob into staging buffers."""
        indices = self._valid_numbers(staging, "staging")
        rows = self._rows(blob, len(indices))

        def program() -> None:
            for row, buffer in zip(rows, indices, strict=True):
                self._staging[buffer].copy_(row)

        self._issue(program, stream, writes=_staging(indices))

    def write(
        self, slots: Sequence[int], sources: Sequence[Sequence[Tensor]], stream: Stream
    ) -> None:
        """Fill slots from tensors that match the descriptor."""
        indices = self._valid_numbers(slots, "slot")
        if len(indices) != len(sources):
            raise SlotError(f"{len(indices)} slots, but sources for {len(sources)}")
        blocks = [self._source(source) for source in sources]

        def program() -> None:
            for slot, block in zip(indices, blocks, strict=True):
                for view, piece in zip(self._slots[slot], block, strict=True):
                    view.copy_(piece)

        self._issue_write(program, stream, indices)

    def commit(self, copies: Sequence[tuple[int, int]], stream: Stream) -> None:
        """Copy staging buffers into slots, in place."""
        buffers = self._valid_numbers([staging for staging, _ in copies], "staging")
        indices = self._valid_numbers([slot for _, slot in copies], "slot")

        def program() -> None:
            for staging, slot in zip(buffers, indices, strict=True):
                for piece, segment in zip(self._staged[staging], self._slots[slot], strict=True):
                    segment.copy_(piece)

        self._issue_write(program, stream, indices, reads=_staging(buffers))

    def checksum_slots(self, slots: Sequence[int], out: Tensor, stream: Stream) -> None:
        """Checksum of each slot's bytes, segments back to back."""
        indices = self._valid_numbers(slots, "slot")
        check_checksum_out(out, len(indices))

        def program() -> None:
            scratch = torch.empty(self._layout.slot_bytes, dtype=torch.uint8)
            pieces = self._parts(scratch)
            for place, slot in enumerate(indices):
                for piece, segment in zip(pieces, self._slots[slot], strict=True):
                    piece.copy_(segment)
                out[place] = as_int64(self._checksum(scratch))

        self._issue(program, stream, reads=_slots(indices))

    def checksum_staging(self, staging: Sequence[int], out: Tensor, stream: Stream) -> None:
        """Checksum of each staging buffer."""
        indices = self._valid_numbers(staging, "staging")
        check_checksum_out(out, len(indices))

        def program() -> None:
            for place, buffer in enumerate(indices):
                out[place] = as_int64(self._checksum(self._staging[buffer]))

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
        """Launch after the earlier operations that touch the same buffers (clause V5)."""

        def issue(on: CpuStream) -> None:
            with self._hazards.track(on, reads=reads, writes=writes):
                on.launch(program)

        own_stream(stream).issue(CpuStreamOp(issue))

    def _issue_write(
        self,
        program: Callable[[], object],
        stream: Stream,
        slots: tuple[int, ...],
        reads: Iterable[Buffer] = (),
    ) -> None:
        """The same for what writes slots: readers see it whole, leases forbid it (A11, A12)."""

        def issue(on: CpuStream) -> None:
            with self._hazards.track(on, reads=reads, writes=_slots(slots)) as end_event:
                readers = self._readers.wait_for_readers(on)
                on.launch(program)
            self._readers.resume_readers(readers, end_event)

        own_stream(stream).issue(CpuStreamOp(issue, lambda: self._leases.exclude_leased(slots)))

    def _checksum(self, data: Tensor) -> int:
        """Checksum of uint8 [n]: the reference."""
        return checksum(data)

    def _parts(self, row: Tensor) -> tuple[Tensor, ...]:
        """The parts of a packed row that the segments of any slot fit; slots are all alike."""
        return torch.split(row, self._sizes)

    def _rows(self, blob: Tensor, count: int) -> list[Tensor]:
        check_packed_blob(self._layout, blob, count)
        return list(blob.view(count, self._layout.slot_bytes))

    def _valid_numbers(self, indices: Sequence[int], kind: str) -> tuple[int, ...]:
        return check_numbers(
            indices, len(self._slots) if kind == "slot" else len(self._staging), kind
        )

    def _source(self, source: Sequence[Tensor]) -> list[Tensor]:
        return [_bytes(segment.data) for segment in source_segments(self._layout, source)]


def _slots(indices: Iterable[int]) -> tuple[Buffer, ...]:
    return tuple(("slot", index) for index in indices)


def _staging(indices: Iterable[int]) -> tuple[Buffer, ...]:
    return tuple(("staging", index) for index in indices)
