"""Slots in device memory, copied by `Tensor.copy_`.

Who waits for whom is decided by the parts that `hal/support` has for every backend; the waits are
torch's events. Memory in use is what `Tensor.record_stream` makes of it, nothing is kept here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from equipoise.backends.torch_accelerator.stream import TorchStream, own_stream
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.checksum import as_int64, checksum
from equipoise.hal.errors import SlotError, Unsupported
from equipoise.hal.slots import SlotLayout
from equipoise.hal.stream import Event, Stream
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

Pair = tuple[Tensor, Tensor]
"""What is written, and what it is copied from: uint8 of equal size."""
Buffer = tuple[str, int]
"""A slot or a staging buffer, by number."""


class TorchSlotStore:
    """Slots as byte views of the layout's tensors, staging as one block of uint8.

    Args:
        layout: the slots; their memory is the caller's.
        device: where the staging is made.
        event: makes a fresh event.
    """

    conversions = 0

    def __init__(
        self, layout: SlotLayout, device: torch.device, event: Callable[[], Event]
    ) -> None:
        if any(kind.format is not SlotFormat.STRIDED for kind in layout.descriptor):
            raise Unsupported("torch has no private format for every device")
        self._layout = layout
        self._slots = [[segment.bytes for segment in slot] for slot in layout.slots]
        # Zeroed on the host: a copy from there has ended when it returns, for every stream.
        self._staging = torch.zeros((layout.staging, layout.slot_bytes), dtype=torch.uint8).to(
            device
        )
        self._hazards = HazardTracker(event)
        self._readers = ReaderRegistry(event)
        self._leases = LeaseTable()

    @property
    def layout(self) -> SlotLayout:
        """What the store was made from."""
        return self._layout

    def pack(self, slots: Sequence[int], blob: Tensor, stream: Stream) -> None:
        """Copy slots into a blob, back to back."""
        indices = self._valid(slots, "slot")
        _check_reachable(blob, "the blob")
        pairs = [
            pair
            for row, slot in zip(self._rows(blob, len(indices)), indices, strict=True)
            for pair in self._pieces(row, slot)
        ]
        self._issue(pairs, stream, reads=_slots(indices))

    def unpack(self, blob: Tensor, staging: Sequence[int], stream: Stream) -> None:
        """Copy a blob into staging buffers."""
        indices = self._valid(staging, "staging")
        rows = self._rows(blob, len(indices))
        pairs = [(self._staging[n], row) for n, row in zip(indices, rows, strict=True)]
        self._issue(pairs, stream, writes=_staging(indices))

    def write(
        self, slots: Sequence[int], sources: Sequence[Sequence[Tensor]], stream: Stream
    ) -> None:
        """Fill slots from tensors that match the descriptor."""
        indices = self._valid(slots, "slot")
        if len(indices) != len(sources):
            raise SlotError(f"{len(indices)} slots, but sources for {len(sources)}")
        blocks = [source_segments(self._layout, source) for source in sources]
        pairs = [
            (view, segment.bytes)
            for slot, block in zip(indices, blocks, strict=True)
            for view, segment in zip(self._slots[slot], block, strict=True)
        ]
        self._issue_write(pairs, stream, indices)

    def commit(self, copies: Sequence[tuple[int, int]], stream: Stream) -> None:
        """Copy staging buffers into slots, in place."""
        buffers = self._valid([staging for staging, _ in copies], "staging")
        indices = self._valid([slot for _, slot in copies], "slot")
        pairs = [
            (view, part)
            for staging, slot in zip(buffers, indices, strict=True)
            for part, view in self._pieces(self._staging[staging], slot)
        ]
        self._issue_write(pairs, stream, indices, reads=_staging(buffers))

    def checksum_slots(self, slots: Sequence[int], out: Tensor, stream: Stream) -> None:
        """Checksum of each slot's bytes, segments back to back; the host waits for it."""
        indices = self._valid(slots, "slot")
        rows = [self._slots[slot] for slot in indices]
        self._sum(rows, out, stream, _slots(indices))

    def checksum_staging(self, staging: Sequence[int], out: Tensor, stream: Stream) -> None:
        """Checksum of each staging buffer; the host waits for it."""
        indices = self._valid(staging, "staging")
        rows = [[self._staging[number]] for number in indices]
        self._sum(rows, out, stream, _staging(indices))

    def attach(self, stream: Stream) -> AttachedReader:
        """From now on commits and writes respect what is launched on `stream`."""
        return self._readers.attach(own_stream(stream))

    def lease(self, slots: Sequence[int]) -> SlotLease:
        """Hold slots against commits and writes."""
        return self._leases.acquire(self._valid(slots, "slot"))

    def _issue(
        self,
        pairs: Sequence[Pair],
        stream: Stream,
        reads: Iterable[Buffer] = (),
        writes: Iterable[Buffer] = (),
    ) -> None:
        own = own_stream(stream)
        with own.issue_lock, self._hazards.track(own, reads=reads, writes=writes):
            own.launch(lambda: _copy(pairs, own))

    def _issue_write(
        self,
        pairs: Sequence[Pair],
        stream: Stream,
        slots: tuple[int, ...],
        reads: Iterable[Buffer] = (),
    ) -> None:
        """As one step for every attached reader (clause V4), and never into a leased slot."""
        own = own_stream(stream)
        with own.issue_lock, self._leases.exclude_leased(slots):
            with self._hazards.track(own, reads=reads, writes=_slots(slots)) as done:
                readers = self._readers.wait_for_readers(own)
                own.launch(lambda: _copy(pairs, own))
            self._readers.resume_readers(readers, done)

    def _sum(
        self,
        rows: Sequence[Sequence[Tensor]],
        out: Tensor,
        stream: Stream,
        reads: tuple[Buffer, ...],
    ) -> None:
        check_checksum_out(out, len(rows))
        _check_reachable(out, "the checksums")
        own = own_stream(stream)

        def program() -> None:
            for place, parts in enumerate(rows):
                out[place].fill_(as_int64(checksum(torch.cat(list(parts)))))

        with own.issue_lock, self._hazards.track(own, reads=reads):
            own.launch(program)

    def _pieces(self, row: Tensor, slot: int) -> Iterator[Pair]:
        """Pairs of (part of a packed row, segment of the slot)."""
        views = self._slots[slot]
        return zip(torch.split(row, [view.numel() for view in views]), views, strict=True)

    def _rows(self, blob: Tensor, count: int) -> list[Tensor]:
        check_packed_blob(self._layout, blob, count)
        return list(blob.view(count, self._layout.slot_bytes))

    def _valid(self, numbers: Sequence[int], kind: str) -> tuple[int, ...]:
        limit = len(self._slots) if kind == "slot" else self._layout.staging
        return check_numbers(numbers, limit, kind)


def _copy(pairs: Sequence[Pair], stream: TorchStream) -> None:
    """On the current stream. A source in pageable memory is read before this returns: torch
    promises nothing for one that is not."""
    for to, source in pairs:
        for tensor in (to, source):
            # A plug-in without it has an allocator of which as much is asked (K1).
            if tensor.device.type != "cpu":
                with suppress(NotImplementedError):
                    tensor.record_stream(stream.native)
        to.copy_(source, non_blocking=not _is_pageable(source))


def _is_pageable(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not tensor.is_pinned()


def _check_reachable(out: Tensor, what: str) -> None:
    """Raise `SlotError` for pageable memory, which a stream cannot write without the host."""
    if _is_pageable(out):
        raise SlotError(f"{what} must lie on the device or in page-locked memory: use pinned()")


def _slots(numbers: Iterable[int]) -> tuple[Buffer, ...]:
    return tuple(("slot", number) for number in numbers)


def _staging(numbers: Iterable[int]) -> tuple[Buffer, ...]:
    return tuple(("staging", number) for number in numbers)
