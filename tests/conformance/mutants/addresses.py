"""Mutants of family *addresses*."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import device_with
from torch import Tensor

from equipoise import _native
from equipoise.backends.virtual.arena import Bytes, bytes_of
from equipoise.backends.virtual.device import Device
from equipoise.backends.virtual.pool import VirtualPool
from equipoise.backends.virtual.slots import Copy, VirtualSlotStore
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.checksum import as_int64
from equipoise.hal.leases import Leases, SlotLease
from equipoise.hal.page_pool import PoolPage
from equipoise.hal.readers import AttachedReader, Readers
from equipoise.hal.slots import SlotLayout
from equipoise.hal.stream import Event, Stream

WORD = 4


class SwappingStore(VirtualSlotStore):
    """From its second commit on, a slot is given other memory instead of other contents."""

    def __init__(self, device: Device, layout: SlotLayout) -> None:
        super().__init__(device, layout)
        self._used: set[int] = set()

    def _scatter(self, row: Bytes, slot: int) -> list[Copy]:
        if slot in self._used:
            fresh = bytes_of(self._device.arena.empty(self._layout.slot_bytes))
            self._slots[slot] = [part for part, _ in self._pieces(fresh, slot)]
        self._used.add(slot)
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
        self._rows(blob, len(slots))
        size = self._layout.slot_bytes
        for slot in dict.fromkeys(slots):
            place = list(slots).index(slot)
            super().pack([slot], blob[place * size : (place + 1) * size], stream)


class AlignedStore(VirtualSlotStore):
    """Segments are read from the last whole word before them."""

    def _gather(self, row: Bytes, slot: int) -> list[Copy]:
        flats = [s.data.reshape(-1).view(torch.uint8) for s in self._layout.slots[slot]]
        aligned = [
            flat.as_strided(flat.shape, (1,), flat.storage_offset() // WORD * WORD)
            for flat in flats
        ]
        pairs = zip(super()._gather(row, slot), aligned, strict=True)
        return [(part, bytes_of(found)) for (part, _), found in pairs]


class AddingStore(VirtualSlotStore):
    """A copy into a slot is an addition to zero, in the segment's dtype."""

    def __init__(self, device: Device, layout: SlotLayout) -> None:
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


class PairByPairStore(VirtualSlotStore):
    """A commit looks at each pair when its turn has come."""

    def commit(self, copies: Sequence[tuple[int, int]], stream: Stream) -> None:
        with self._leases.barred([slot for _, slot in copies]):
            for pair in copies:
                super().commit([pair], stream)


class WrappingStore(VirtualSlotStore):
    """Numbers below zero count from the end."""

    def _known(self, numbers: Sequence[int], limit: int, what: str) -> tuple[int, ...]:
        return super()._known([n + limit if -limit <= n < 0 else n for n in numbers], limit, what)


class GenerousStore(VirtualSlotStore):
    """A blob may be larger than what goes into it."""

    def _rows(self, blob: Tensor, count: int) -> list[Bytes]:
        return super()._rows(blob[: count * self._layout.slot_bytes], count)


class UnpackingStore(VirtualSlotStore):
    """Packs a private format in an order that nobody restores."""

    def _gather(self, row: Bytes, slot: int) -> list[Copy]:
        formats = [wanted.format for wanted in self._layout.descriptor]
        pairs = zip(super()._gather(row, slot), formats, strict=True)
        return [(p[::-1] if f is SlotFormat.PRIVATE else p, found) for (p, found), f in pairs]


class FirstSlotLeases(Leases):
    """Only the first slot of a batch is looked at."""

    def barred(self, slots: Iterable[int]) -> AbstractContextManager[None]:
        return super().barred(list(slots)[:1])


class RecountedLeases(Leases):
    """A lease that is released twice gives back somebody else's too."""

    def end(self, lease: SlotLease) -> None:
        lease.ended = False
        super().end(lease)


class FlatLeases(Leases):
    """A slot is leased or not: the first release frees it."""

    def take(self, slots: Iterable[int]) -> SlotLease:
        lease = super().take(slots)
        self._counts.update(dict.fromkeys(lease.slots, 0))
        for slot in lease.slots:
            self._counts[slot] = 1
        return lease


class HastyWriters(Readers):
    """A commit does not wait for what readers have launched."""

    def hold(self, writer: Stream) -> tuple[Stream, ...]:
        streams = dict.fromkeys(reader.stream for reader in self._attached)
        return tuple(stream for stream in streams if stream is not writer)


class HastyReaders(Readers):
    """What readers launch later does not wait for the commit."""

    def follow(self, held: Iterable[Stream], done: Event) -> None:
        return None


class FirstReaderOnly(Readers):
    """One reader is respected: that which was attached first."""

    def attach(self, stream: Stream) -> AttachedReader:
        if self._attached:
            return AttachedReader(self, stream)
        return super().attach(stream)


class ForgettingReaders(Readers):
    """What a reader had launched is forgotten when it is detached."""

    def leave(self, reader: AttachedReader) -> None:
        super().leave(reader)
        self._left.clear()


class StreamwiseReaders(Readers):
    """Detaching one of a stream's readers detaches the stream."""

    def leave(self, reader: AttachedReader) -> None:
        for other in [r for r in self._attached if r.stream is reader.stream]:
            super().leave(other)


class HastyPool(VirtualPool):
    """A page is free as soon as it was given back."""

    def put(self, page: PoolPage, after: Event | None) -> None:
        super().put(page, None)


class ForgivingPool(VirtualPool):
    """A page may be given back twice, and is then handed out twice."""

    def put(self, page: PoolPage, after: Event | None) -> None:
        page.returned = False
        super().put(page, after)


class WordSums(VirtualSlotStore):
    """Bytes behind the last whole word are not summed."""

    def _sum(self, row: Bytes, out: Tensor, place: int) -> None:
        out[place] = as_int64(_native.checksum(row[: len(row) // WORD * WORD]))


CONTENTS = "a-slot-is-its-segments"
FLOATS = "floats-that-arithmetic-would-change-survive"
MAPPINGS = "any-mapping-of-slots-ends-as-proposed"
ARGUMENTS = "a-bad-argument-changes-nothing"
LEASES = "a-leased-slot-is-written-by-nobody"
READERS = "attached-readers-and-commits-keep-the-order-of-issue"
PAGES = "a-page-is-not-handed-out-under-a-copy"
SUMS = "checksums-are-those-of-the-definition"
MACHINE = "everything-at-once-shows-what-is-due"
# A slot of several bytes that is read while it is written is torn, a batch is seen in parts; and
# the machine has readers, too.
READ = ("a-slot-is-read-whole", "a-batch-is-seen-whole", MACHINE)
MUTANTS = (
    Mutant(
        name="a-slot-is-given-other-memory",
        clause="A1",
        broken="A commit exchanges buffers, so graphs and kernels read what was there before.",
        property=CONTENTS,
        # Whatever reads through the layout's own tensors reads what was there before.
        also=("who-waits-for-a-commit-sees-it", READERS, MACHINE),
        subject=device_with(slots=SwappingStore),
    ),
    Mutant(
        name="copies-are-rounded-up-to-words",
        clause="A4",
        broken="The bytes behind a segment, or behind a blob, are written over.",
        property=CONTENTS,
        subject=device_with(slots=SpillingStore),
    ),
    Mutant(
        name="segments-are-read-from-whole-words",
        clause="A6",
        broken="The offset of a segment is taken for aligned (SGLang #29424 knows offset 0 only).",
        property=CONTENTS,
        subject=device_with(slots=AlignedStore),
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
        name="a-commit-is-checked-pair-by-pair",
        clause="A8",
        broken="What stands before a bad pair is committed.",
        property=ARGUMENTS,
        subject=device_with(slots=PairByPairStore),
    ),
    Mutant(
        name="negative-numbers-count-from-the-end",
        clause="A8",
        broken="Slot -1 is the last slot instead of an error.",
        property=ARGUMENTS,
        subject=device_with(slots=WrappingStore),
    ),
    Mutant(
        name="a-blob-may-be-too-large",
        clause="A8",
        broken="What does not fit a blob's size is taken from its beginning.",
        property=ARGUMENTS,
        subject=device_with(slots=GenerousStore),
    ),
    Mutant(
        name="private-formats-are-taken-apart",
        clause="A10",
        broken="A private format is packed in an order that nobody restores (SGLang #29424).",
        property="private-formats-travel-whole",
        subject=device_with(slots=UnpackingStore),
    ),
    Mutant(
        name="only-the-first-slot-of-a-batch-is-looked-at",
        clause="A11",
        broken="A leased slot is committed over, if it is not the first of its batch.",
        property=LEASES,
        subject=device_with(leases=FirstSlotLeases),
    ),
    Mutant(
        name="a-lease-gives-back-more-than-it-took",
        clause="A11",
        broken="The second release of a lease ends another lease of the slot.",
        property=LEASES,
        # The machine leases and releases, too.
        also=(MACHINE,),
        subject=device_with(leases=RecountedLeases),
    ),
    Mutant(
        name="leases-of-a-slot-do-not-add-up",
        clause="A11",
        broken="The first release of two frees the slot while the other peer still reads.",
        property=LEASES,
        # The machine leases and releases, too.
        also=(MACHINE,),
        subject=device_with(leases=FlatLeases),
    ),
    Mutant(
        name="a-commit-does-not-wait-for-readers",
        clause="A12",
        broken="A slot is written while a launched forward reads it.",
        property=READERS,
        also=READ,
        subject=device_with(readers=HastyWriters),
    ),
    Mutant(
        name="readers-do-not-wait-for-a-commit",
        clause="A12",
        broken="What is launched behind a commit reads what was there before.",
        property=READERS,
        also=READ,
        subject=device_with(readers=HastyReaders),
    ),
    Mutant(
        name="one-reader-is-respected",
        clause="A12",
        broken="Of several streams that read, the first attached is waited for: no draft model.",
        property=READERS,
        also=READ,
        subject=device_with(readers=FirstReaderOnly),
    ),
    Mutant(
        name="a-detached-reader-is-forgotten-at-once",
        clause="A12",
        broken="What a stream had launched before it was detached is not waited for.",
        property=READERS,
        subject=device_with(readers=ForgettingReaders),
    ),
    Mutant(
        name="detaching-one-reader-detaches-its-stream",
        clause="A12",
        broken="A stream with two readers is forgotten with the first of them.",
        property=READERS,
        # The machine attaches streams twice, too.
        also=(MACHINE,),
        subject=device_with(readers=StreamwiseReaders),
    ),
    Mutant(
        name="a-page-is-free-when-it-is-given-back",
        clause="A13",
        broken="A page is handed out while a copy still reads it (TensorRT-LLM's host pool).",
        property=PAGES,
        # The machine writes slots from pages, too.
        also=(MACHINE,),
        subject=device_with(pool=HastyPool),
    ),
    Mutant(
        name="a-page-can-be-given-back-twice",
        clause="A13",
        broken="Two takers get the same page.",
        property=PAGES,
        subject=device_with(pool=ForgivingPool),
    ),
    Mutant(
        name="checksums-see-whole-words-only",
        clause="D4",
        broken="The last bytes of a slot of odd size are not summed.",
        property=SUMS,
        subject=device_with(slots=WordSums),
    ),
)
