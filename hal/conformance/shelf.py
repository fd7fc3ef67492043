"""A slot store on a bench: slots between guard bands, and verbs whose bytes say who wrote them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.conformance.bench import Bench, Guarded, settled, told
from equipoise.hal.slots import Segment, SlotLayout, SlotStore
from equipoise.hal.stream import Role, Stream

ROLES = tuple(role.value for role in Role)[:3]
"""Streams that the programs of slot properties use."""


@dataclass(frozen=True)
class Part:
    """One segment of every slot.

    Attributes:
        dtype: of its elements.
        elements: how many.
        offset: bytes by which it is off the allocator's alignment; a multiple of the item size.
        format: how its bytes are laid out; a private one has offset 0 and no guard bands.
        padding: bytes to store behind the elements; of a private format only.
    """

    dtype: torch.dtype
    elements: int
    offset: int = 0
    format: SlotFormat = SlotFormat.STRIDED
    padding: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.elements * self.dtype.itemsize


@dataclass
class Shelf:
    """A store, the memory of its slots, and what is in flight.

    Verbs take a *version* where they bring bytes: every byte is that number, so that whoever reads
    a byte knows who wrote it. What a verb reads from is kept here all the same: that a store owns
    what it is given is the business of family *keepalive* (K1).

    Attributes:
        bench: where it stands.
        parts: the segments of every slot.
        guards: the memory of each strided segment, and of other buffers that need a guard.
        layout: the slots, as they were given to the store.
        store: made over that memory.
        kept: what verbs in flight may still use.
    """

    bench: Bench
    parts: Sequence[Part]
    guards: list[Guarded]
    layout: SlotLayout
    store: SlotStore
    kept: list[Tensor] = field(default_factory=list)

    def stream(self, role: str) -> Stream:
        """The stream of that role, after a delay of the executor's choice."""
        stream = self.bench.accelerator.stream(Role(role))
        self.bench.disturb(stream)
        return stream

    def bytes_of(self, slot: int) -> Tensor:
        """uint8 [slot_bytes]: a copy of what the layout's own tensors hold now."""
        return torch.cat([told(part) for part in self.views(slot)])

    def views(self, slot: int) -> list[Tensor]:
        """The slot's segments as bytes, through the layout's own tensors."""
        return [self.bench.stored(segment) for segment in self.layout.slots[slot]]

    def unpack(self, staging: Sequence[int], version: int, role: str) -> None:
        """Bring a version into staging."""
        blob = self.bench.filled((len(staging) * self.slot_bytes,), version)
        self.kept.append(blob)
        self.store.unpack(blob, staging, self.stream(role))

    def write(self, slots: Sequence[int], version: int, role: str) -> None:
        """Write a version into slots."""
        source = self.source(self.bench.filled((self.slot_bytes,), version))
        self.store.write(slots, [source] * len(slots), self.stream(role))

    def source(self, content: Tensor) -> list[Tensor]:
        """The segments of a slot with these bytes, uint8 [slot_bytes], for `write`."""
        pieces = torch.split(content, [kind.nbytes for kind in self.layout.descriptor])
        pairs = zip(self.parts, pieces, strict=True)
        made = [_source(self.bench, part, piece) for part, piece in pairs]
        self.kept += made
        return made

    def pack(self, slots: Sequence[int], role: str) -> Tensor:
        """A blob that `slots` are being packed into."""
        blob = self.bench.empty((len(slots) * self.slot_bytes,))
        self.store.pack(slots, blob, self.stream(role))
        return blob

    def look(self, slots: Sequence[int], role: str) -> Tensor:
        """A blob that a launch on the stream copies the layout's own tensors of `slots` to."""
        blob = self.bench.empty((len(slots) * self.slot_bytes,))
        views = [view for slot in slots for view in self.views(slot)]
        parts = torch.split(blob, [view.numel() for view in views])
        self.stream(role).launch(lambda: _copy_all(parts, views))
        return blob

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self.layout.slot_bytes

    def intact(self) -> bool:
        """Whether nobody touched the guard bands."""
        return all(guard.intact() for guard in self.guards)


def shelf(bench: Bench, slots: int, staging: int, parts: Sequence[Part]) -> Shelf:
    """A store whose slots hold version 0. Raises what `slot_store` raises."""
    guards: list[Guarded] = []
    rows = tuple(
        tuple(_segment(bench, guards, f"part{k}", part) for k, part in enumerate(parts))
        for _ in range(slots)
    )
    layout = SlotLayout(rows, staging)
    return Shelf(bench, parts, guards, layout, bench.accelerator.slot_store(layout))


def plain(bench: Bench, slots: int, staging: int, width: int) -> Shelf:
    """Slots of one segment of `width` bytes."""
    return shelf(bench, slots, staging, [Part(torch.uint8, width)])


def versions(blob: Tensor) -> list[int]:
    """Every version of which `blob` holds a byte, ascending."""
    return sorted(set(told(blob).tolist()))


def listed(found: Sequence[int]) -> str:
    """Versions in words."""
    return " and ".join(map(str, found))


def _segment(bench: Bench, guards: list[Guarded], name: str, part: Part) -> Segment:
    if part.format is SlotFormat.PRIVATE:
        made = _private(bench, name, part)
        settled(bench.stored(made).zero_())
        return made
    guard = bench.guarded(part.nbytes, part.offset)
    guards.append(guard)
    return Segment(name, settled(guard.data.zero_()).view(part.dtype), part.format)


def _source(bench: Bench, part: Part, content: Tensor) -> Tensor:
    if part.format is SlotFormat.PRIVATE:
        made = _private(bench, "source", part)
        settled(bench.stored(made).copy_(content))
        return made.data
    return bench.of(content).view(part.dtype)


def _private(bench: Bench, name: str, part: Part) -> Segment:
    return Segment(name, bench.private(part.elements, part.dtype, part.padding), part.format)


def _copy_all(parts: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    for part, view in zip(parts, views, strict=True):
        part.copy_(view)
