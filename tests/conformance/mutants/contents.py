"""Mutants of family *addresses*: what slots hold."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import device_with
from torch import Tensor

from equipoise import _native
from equipoise.backends.virtual.arena import Bytes, bytes_of
from equipoise.backends.virtual.device import VirtualDevice
from equipoise.backends.virtual.slots import Copy, VirtualSlotStore
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.checksum import as_int64
from equipoise.hal.slots import SegmentType, SlotLayout
from equipoise.hal.stream import Stream

WORD = 4


class SwappingStore(VirtualSlotStore):
    """From its second commit on, a slot gets other memory instead of other contents."""

    def __init__(self, device: VirtualDevice, layout: SlotLayout) -> None:
        super().__init__(device, layout)
        self._used_slots: set[int] = set()

    def _scatter(self, row: Bytes, slot: int) -> list[Copy]:
        if slot in self._used_slots:
            fresh = bytes_of(self._device.arena.empty(self._layout.slot_bytes))
            self._slots[slot] = [part for part, _ in self._pieces(fresh, slot)]
        self._used_slots.add(slot)
        return super()._scatter(row, slot)


class SpillingStore(VirtualSlotStore):
    """Copies are rounded up to whole words."""

    def _perform(self, copies: Sequence[Copy]) -> Iterator[None]:
        for into, source in copies:
            yield from super()._perform([(into, source)])
            whole = -(-len(into) // WORD) * WORD
            np.lib.stride_tricks.as_strided(into, (whole,), (1,))[len(into) :] = 0


class OneSlotABufferStore(VirtualSlotStore):
    """A batch is kept by staging buffer, so one buffer goes to one slot."""

    def commit(self, copies: Sequence[tuple[int, int]], stream: Stream) -> None:
        super().commit(list(dict(copies).items()), stream)


class OncePackingStore(VirtualSlotStore):
    """A slot that is named twice is packed once."""

    def pack(self, slots: Sequence[int], blob: Tensor, stream: Stream) -> None:
        self._valid_numbers(slots, len(self._slots), "slot")
        self._rows(blob, len(slots))
        size = self._layout.slot_bytes
        for slot in dict.fromkeys(slots):
            place = list(slots).index(slot)
            super().pack([slot], blob[place * size : (place + 1) * size], stream)


class AlignedStore(VirtualSlotStore):
    """Segments are read from the last whole word before them."""

    def _gather(self, row: Bytes, slot: int) -> list[Copy]:
        tensors = [segment.data for segment in self._layout.slots[slot]]
        pairs = zip(super()._gather(row, slot), tensors, strict=True)
        return [(part, self._aligned(tensor)) for (part, _), tensor in pairs]

    def _aligned(self, tensor: Tensor) -> Bytes:
        flat = tensor.reshape(-1).view(torch.uint8)
        start = int(flat.storage_offset()) // WORD * WORD
        return bytes_of(flat.as_strided(flat.shape, (1,), start))


class AddingStore(VirtualSlotStore):
    """A copy into a slot is an addition to zero, in the segment's dtype."""

    def __init__(self, device: VirtualDevice, layout: SlotLayout) -> None:
        super().__init__(device, layout)
        tensors = [segment.data for slot in layout.slots for segment in slot]
        self._tensors = {tensor.data_ptr(): tensor for tensor in tensors}

    def _perform(self, copies: Sequence[Copy]) -> Iterator[None]:
        for into, source in copies:
            yield from super()._perform([(into, source)])
            tensor = self._tensors.get(into.ctypes.data)
            if tensor is not None:
                tensor.add_(0)


class ConvertingStore(VirtualSlotStore):
    """Segments of equal descriptor take the slow way, though the bytes come out right."""

    @property
    def conversions(self) -> int:
        return len(self._layout.descriptor)


class UnpackingStore(VirtualSlotStore):
    """Packs a private format in an order that unpacking does not restore."""

    def _gather(self, row: Bytes, slot: int) -> list[Copy]:
        formats = [expected.format for expected in self._layout.descriptor]
        pairs = zip(super()._gather(row, slot), formats, strict=True)
        return [
            (p[::-1] if f is SlotFormat.PRIVATE else p, segment_format)
            for (p, segment_format), f in pairs
        ]


def _element_bytes(expected: SegmentType) -> int:
    """Bytes of the elements, without the padding."""
    return expected.nbytes - expected.padding


class ShownBytesStore(VirtualSlotStore):
    """Of a private segment, what the tensor shows is packed and committed."""

    def _pieces(self, row: Bytes, slot: int) -> Iterator[tuple[Bytes, Bytes]]:
        pairs = zip(super()._pieces(row, slot), self._layout.descriptor, strict=True)
        for (part, segment), expected in pairs:
            yield part[: _element_bytes(expected)], segment[: _element_bytes(expected)]


class ClearingStore(VirtualSlotStore):
    """A write lays out a private segment anew: its padding is zero."""

    def _source(self, source: Sequence[Tensor]) -> list[Bytes]:
        blocks = super()._source(source)
        return [self._cleared(b, w) for b, w in zip(blocks, self._layout.descriptor, strict=True)]

    def _cleared(self, block: Bytes, expected: SegmentType) -> Bytes:
        if not expected.padding:
            return block
        copy = block.copy()
        copy[_element_bytes(expected) :] = 0
        return copy


class ShownSums(VirtualSlotStore):
    """Of a private segment, what the tensor shows is summed."""

    def _sum(self, row: Bytes, out: Tensor, place: int) -> None:
        parts, start = [], 0
        for expected in self._layout.descriptor:
            parts.append(row[start : start + _element_bytes(expected)])
            start += expected.nbytes
        super()._sum(np.concatenate(parts), out, place)


class WordSums(VirtualSlotStore):
    """Bytes after the last whole word are not summed."""

    def _sum(self, row: Bytes, out: Tensor, place: int) -> None:
        out[place] = as_int64(_native.checksum(row[: len(row) // WORD * WORD]))


CONTENTS = "operations-move-every-byte-of-the-segments"
FLOATS = "floats-that-arithmetic-would-change-survive"
PRIVATE = "private-formats-travel-whole"
MAPPINGS = "any-slot-mapping-is-committed-correctly"
READERS = "attached-readers-and-commits-keep-the-order-of-issue"
SUMS = "checksums-are-those-of-the-definition"
MACHINE = "accelerator-state-machine-matches-its-model"
LONG = "slots-of-any-length-are-copied-whole"
MANY = "an-operation-takes-hundreds-of-slots"
MUTANTS = (
    Mutant(
        name="a-slot-is-given-other-memory",
        clause="A1",
        broken="A commit exchanges buffers, so graphs and kernels read what was there before.",
        property=CONTENTS,
        # Whatever reads through the layout's own tensors reads what was there before, and a
        # checksum on its way finds the other memory.
        also=(
            "a-commit-is-visible-after-its-event",
            "a-batch-is-seen-whole",
            "tables-and-weights-of-a-layer-change-together",
            READERS,
            SUMS,
            MACHINE,
            "private-formats-travel-whole",
            "slot-operations-own-their-buffers",
        ),
        subject=device_with(slots=SwappingStore),
    ),
    Mutant(
        name="copies-are-rounded-up-to-words",
        clause="A4",
        broken="The bytes behind a segment, or behind a blob, are written over.",
        property=CONTENTS,
        subject=device_with(slots=SpillingStore),
        # Long segments and many slots have odd lengths and neighbours, too.
        also=(LONG, MANY),
    ),
    Mutant(
        name="segments-are-read-from-whole-words",
        clause="A6",
        broken="The offset of a segment is taken for aligned (SGLang #29424 knows offset 0 only).",
        property=CONTENTS,
        subject=device_with(slots=AlignedStore),
        # Private segments are read in the same way.
        also=("private-formats-travel-whole",),
    ),
    Mutant(
        name="one-buffer-goes-to-one-slot",
        clause="A5",
        broken="Of several slots with one source, one gets it.",
        property=MAPPINGS,
        subject=device_with(slots=OneSlotABufferStore),
    ),
    Mutant(
        name="a-slot-named-twice-is-packed-once",
        clause="A5",
        broken="An expert that is sent twice arrives once (vLLM #18343 holds one twice).",
        property=MAPPINGS,
        subject=device_with(slots=OncePackingStore),
    ),
    Mutant(
        name="a-copy-is-an-addition-to-zero",
        clause="A7",
        broken="Minus zero and signalling not-a-number change on their way.",
        property=FLOATS,
        subject=device_with(slots=AddingStore),
    ),
    Mutant(
        name="equal-descriptors-are-converted",
        clause="A7",
        broken="Slots of equal descriptor are copied by something slower than bytes.",
        property=FLOATS,
        subject=device_with(slots=ConvertingStore),
    ),
    Mutant(
        name="private-formats-are-taken-apart",
        clause="A10",
        broken="A private format is packed in an order that nobody restores (SGLang #29424).",
        property=PRIVATE,
        subject=device_with(slots=UnpackingStore),
    ),
    Mutant(
        name="what-a-tensor-shows-travels",
        clause="A10",
        broken="The padding of a private format stays behind, as with a view of bytes.",
        property=PRIVATE,
        subject=device_with(slots=ShownBytesStore),
    ),
    Mutant(
        name="padding-is-cleared-by-a-write",
        clause="A10",
        broken="A source is converted anew, which loses what its padding holds.",
        property=PRIVATE,
        subject=device_with(slots=ClearingStore),
    ),
    Mutant(
        name="checksums-leave-out-padding",
        clause="A10",
        broken="What got lost in the padding of a private format is not noticed.",
        property=PRIVATE,
        subject=device_with(slots=ShownSums),
    ),
    Mutant(
        name="checksums-see-whole-words-only",
        clause="D4",
        broken="The last bytes of a slot of odd size are not summed.",
        property=SUMS,
        subject=device_with(slots=WordSums),
        # Private formats are checksummed in the same way, and so are long slots and many.
        also=("private-formats-travel-whole", LONG, MANY),
    ),
)
