"""A slot store that runs every call at once, so calls are in the order of issue."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from equipoise.hal import SlotFormat, SlotLayout, Stream, checksum
from equipoise.hal.errors import SlotError, Unsupported
from equipoise.hal.support import slot_access, validation

A = TypeVar("A")
B = TypeVar("B")


class InlineReader:
    """A reader whose launches have all run: no write needs to wait for it."""

    def detach(self) -> None:
        """Nothing to undo."""


class InlineSlotStore:
    """Slots as the layout's own tensors; staging as one block of uint8 [staging, slot_bytes]."""

    conversions = 0

    def __init__(self, layout: SlotLayout) -> None:
        if any(description.format is not SlotFormat.STRIDED for description in layout.descriptor):
            raise Unsupported("no private format is known here")
        self._layout = layout
        self._staging = torch.zeros((layout.staging, layout.slot_bytes), dtype=torch.uint8)
        self._leases = slot_access.LeaseTable()

    @property
    def layout(self) -> SlotLayout:
        """What the store was made from."""
        return self._layout

    def pack(self, slots: Sequence[int], blob: Tensor, stream: Stream) -> None:
        """Copy slots into a blob, back to back."""
        rows = self._rows(blob, len(slots))
        pairs = list(zip(rows, [self._slot(slot) for slot in slots], strict=True))
        stream.launch(lambda: _each(_gather, pairs))

    def unpack(self, blob: Tensor, staging: Sequence[int], stream: Stream) -> None:
        """Copy a blob into staging buffers."""
        rows = self._rows(blob, len(staging))
        pairs = list(zip([self._buffer(number) for number in staging], rows, strict=True))
        stream.launch(lambda: _each(Tensor.copy_, pairs))

    def write(
        self, slots: Sequence[int], sources: Sequence[Sequence[Tensor]], stream: Stream
    ) -> None:
        """Fill slots from tensors that match the descriptor."""
        if len(slots) != len(sources):
            raise SlotError(f"{len(slots)} slots, but sources for {len(sources)}")
        blocks = [self._source(source) for source in sources]
        pairs = list(zip([self._slot(slot) for slot in slots], blocks, strict=True))
        with self._leases.exclude_leased(slots):
            stream.launch(lambda: _each(_copy, pairs))

    def commit(self, copies: Sequence[tuple[int, int]], stream: Stream) -> None:
        """Copy staging buffers into slots, in place."""
        pairs = [(self._buffer(staging), self._slot(slot)) for staging, slot in copies]
        with self._leases.exclude_leased([slot for _, slot in copies]):
            stream.launch(lambda: _each(_scatter, pairs))

    def checksum_slots(self, slots: Sequence[int], out: Tensor, stream: Stream) -> None:
        """Checksum of each slot's bytes, segments back to back."""
        blob = torch.empty(len(slots) * self._layout.slot_bytes, dtype=torch.uint8)
        validation.check_checksum_out(out, len(slots))
        self.pack(slots, blob, stream)
        rows = self._rows(blob, len(slots))
        stream.launch(lambda: _sum_rows(rows, out))

    def checksum_staging(self, staging: Sequence[int], out: Tensor, stream: Stream) -> None:
        """Checksum of each staging buffer."""
        rows = [self._buffer(number) for number in staging]
        validation.check_checksum_out(out, len(rows))
        stream.launch(lambda: _sum_rows(rows, out))

    def attach(self, stream: Stream) -> InlineReader:
        """Does nothing: every stream's launches have run when the next call is made."""
        return InlineReader()

    def lease(self, slots: Sequence[int]) -> slot_access.SlotLease:
        """Hold slots against commits and writes."""
        for slot in slots:
            self._slot(slot)
        return self._leases.acquire(slots)

    def _slot(self, number: int) -> list[Tensor]:
        validation.check_numbers([number], len(self._layout.slots), "slot")
        return [_bytes(segment.data) for segment in self._layout.slots[number]]

    def _buffer(self, number: int) -> Tensor:
        validation.check_numbers([number], len(self._staging), "staging")
        return self._staging[number]

    def _rows(self, blob: Tensor, count: int) -> list[Tensor]:
        validation.check_packed_blob(self._layout, blob, count)
        return list(blob.view(count, self._layout.slot_bytes))

    def _source(self, source: Sequence[Tensor]) -> list[Tensor]:
        return [
            _bytes(segment.data) for segment in validation.source_segments(self._layout, source)
        ]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _each(do: Callable[[A, B], object], pairs: Iterable[tuple[A, B]]) -> None:
    for left, right in pairs:
        do(left, right)


def _copy(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    for target, part in zip(to, source, strict=True):
        target.copy_(part)


def _scatter(row: Tensor, slot: Sequence[Tensor]) -> None:
    _copy(slot, torch.split(row, [part.numel() for part in slot]))


def _gather(row: Tensor, slot: Sequence[Tensor]) -> None:
    _copy(torch.split(row, [part.numel() for part in slot]), slot)


def _sum_rows(rows: Sequence[Tensor], out: Tensor) -> None:
    for place, row in enumerate(rows):
        out[place] = checksum.as_int64(checksum.checksum(row))
