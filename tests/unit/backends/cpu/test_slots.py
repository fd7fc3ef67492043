"""The slot store of the CPU: clauses A1, A4, A6, A8, D4, R2."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.backends.cpu.slots import CpuSlotStore
from equipoise.backends.cpu.stream import CpuStream
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.checksum import MASK64, checksum
from equipoise.hal.errors import SlotError, Unsupported
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role

SOON = 20.0
GUARD = 3
"""Elements left and right of every segment that nobody may touch."""
DTYPES = (torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64, torch.bool)
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


class Here(CpuStream):
    """A stream that runs everything at once, so that failures surface where they happen."""

    def _submit(self, task: Any) -> None:
        task.run()


HERE = Here(Role.COPY, "here")


@dataclass
class Rack:
    """A store over segments that stand inside guarded storages."""

    store: CpuSlotStore
    storages: list[list[Tensor]]

    def slot(self, number: int) -> bytes:
        views = [segment.data for segment in self.store.layout.slots[number]]
        return b"".join(raw(view).numpy().tobytes() for view in views)

    def guards(self) -> list[bytes]:
        parts = [part for storages in self.storages for part in storages]
        return [raw(p[:GUARD]).numpy().tobytes() + raw(p[-GUARD:]).numpy().tobytes() for p in parts]

    def addresses(self) -> list[tuple[int, torch.Size, torch.dtype]]:
        segments = [segment.data for slot in self.store.layout.slots for segment in slot]
        return [(data.data_ptr(), data.shape, data.dtype) for data in segments]


def raw(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def noise(seed: int, count: int, dtype: torch.dtype) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    data = torch.randint(0, high, (count * dtype.itemsize,), generator=random, dtype=torch.uint8)
    return data.view(dtype)


@st.composite
def racks(draw: st.DrawFn) -> Rack:
    kinds = draw(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=3))
    count, staging = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    slots: list[tuple[Segment, ...]] = []
    storages: list[list[Tensor]] = []
    for number in range(count):
        segments, parts = [], []
        for place, (shape, dtype) in enumerate(kinds):
            size = int(torch.Size(shape).numel())
            storage = noise(17 * number + place, size + 2 * GUARD, dtype)
            parts.append(storage)
            segments.append(Segment(f"s{place}", storage[GUARD : GUARD + size].view(shape)))
        slots.append(tuple(segments))
        storages.append(parts)
    return Rack(CpuSlotStore(SlotLayout(tuple(slots), staging)), storages)


def some(count: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, count - 1), max_size=5) if count else st.just([])


@given(racks(), st.data())
def test_a_packed_blob_is_the_slots_back_to_back(rack: Rack, data: st.DataObject) -> None:
    chosen = data.draw(some(len(rack.store.layout.slots)))
    blob = torch.empty(len(chosen) * rack.store.layout.slot_bytes, dtype=torch.uint8)
    rack.store.pack(chosen, blob, HERE)
    assert blob.numpy().tobytes() == b"".join(rack.slot(number) for number in chosen)


@given(racks(), st.data())
def test_what_is_unpacked_and_committed_arrives_and_nothing_else_changes(
    rack: Rack, data: st.DataObject
) -> None:
    layout = rack.store.layout
    staging = data.draw(st.permutations(range(layout.staging)))
    blob = noise(99, layout.slot_bytes * layout.staging, torch.uint8) & 1
    pairs = st.tuples(st.integers(0, layout.staging - 1), st.integers(0, len(layout.slots) - 1))
    copies = data.draw(st.lists(pairs, max_size=5)) if layout.staging else []
    expected = [rack.slot(number) for number in range(len(layout.slots))]
    guards, addresses = rack.guards(), rack.addresses()
    rack.store.unpack(blob, staging, HERE)
    rack.store.commit(copies, HERE)
    size = layout.slot_bytes
    for buffer, slot in copies:
        place = staging.index(buffer)
        expected[slot] = blob[place * size : (place + 1) * size].numpy().tobytes()
    assert [rack.slot(number) for number in range(len(layout.slots))] == expected
    assert rack.guards() == guards
    assert rack.addresses() == addresses


@given(racks(), st.data())
def test_written_sources_arrive_in_their_slots_and_nowhere_else(
    rack: Rack, data: st.DataObject
) -> None:
    layout = rack.store.layout
    chosen = data.draw(st.permutations(range(len(layout.slots))).flatmap(prefixes))
    sources = [
        [
            noise(s, int(torch.Size(t.shape).numel()), t.dtype).view(t.shape)
            for t in layout.descriptor
        ]
        for s in chosen
    ]
    expected = [rack.slot(number) for number in range(len(layout.slots))]
    guards, addresses = rack.guards(), rack.addresses()
    rack.store.write(chosen, sources, HERE)
    for slot, source in zip(chosen, sources, strict=True):
        expected[slot] = b"".join(raw(part).numpy().tobytes() for part in source)
    assert [rack.slot(number) for number in range(len(layout.slots))] == expected
    assert rack.guards() == guards
    assert rack.addresses() == addresses


def prefixes(order: list[int]) -> st.SearchStrategy[list[int]]:
    return st.integers(0, len(order)).map(lambda size: list(order[:size]))


@given(racks())
def test_checksums_are_those_of_the_reference(rack: Rack) -> None:
    layout = rack.store.layout
    everything = range(len(layout.slots))
    out = torch.zeros(len(layout.slots), dtype=torch.int64)
    rack.store.checksum_slots(everything, out, HERE)
    whole = [
        torch.frombuffer(bytearray(rack.slot(n)), dtype=torch.uint8)
        if layout.slot_bytes
        else torch.empty(0, dtype=torch.uint8)
        for n in everything
    ]
    assert [value & MASK64 for value in out.tolist()] == [checksum(data) for data in whole]
    blob = noise(5, layout.slot_bytes * layout.staging, torch.uint8)
    staged = torch.zeros(layout.staging, dtype=torch.int64)
    rack.store.unpack(blob, range(layout.staging), HERE)
    rack.store.checksum_staging(range(layout.staging), staged, HERE)
    parts = blob.view(layout.staging, layout.slot_bytes)
    assert [value & MASK64 for value in staged.tolist()] == [checksum(part) for part in parts]


@settings(max_examples=30)
@given(racks())
def test_packing_unpacking_and_committing_in_turn_gives_back_the_same_bytes(rack: Rack) -> None:
    layout = rack.store.layout
    numbers = range(min(layout.staging, len(layout.slots)))
    blob = torch.empty(len(numbers) * layout.slot_bytes, dtype=torch.uint8)
    before = [rack.slot(number) for number in range(len(layout.slots))]
    rack.store.pack(numbers, blob, HERE)
    rack.store.unpack(blob, numbers, HERE)
    for slot in layout.slots:
        for segment in slot:
            raw(segment.data).zero_()
    rack.store.commit([(number, number) for number in numbers], HERE)
    assert [rack.slot(number) for number in numbers] == before[: len(numbers)]


def store_of_two() -> CpuSlotStore:
    slots = [
        (Segment("a", torch.full((2, 2), float(n))), Segment("b", torch.zeros(3))) for n in range(2)
    ]
    return CpuSlotStore(SlotLayout(tuple(slots), 2))


def good() -> list[Tensor]:
    return [torch.ones(2, 2), torch.ones(3)]


BYTES = 28
BAD: dict[str, Callable[[CpuSlotStore, CpuStream], None]] = {
    "slot beyond": lambda s, t: s.pack([2], torch.zeros(BYTES, dtype=torch.uint8), t),
    "slot below": lambda s, t: s.pack([-1], torch.zeros(BYTES, dtype=torch.uint8), t),
    "blob too short": lambda s, t: s.pack([0, 1], torch.zeros(BYTES, dtype=torch.uint8), t),
    "blob of floats": lambda s, t: s.pack([0], torch.zeros(BYTES), t),
    "blob of rows": lambda s, t: s.pack([0], torch.zeros(1, BYTES, dtype=torch.uint8), t),
    "a strided blob": lambda s, t: s.pack([0], torch.zeros(2 * BYTES, dtype=torch.uint8)[::2], t),
    "staging beyond": lambda s, t: s.unpack(torch.zeros(BYTES, dtype=torch.uint8), [2], t),
    "blob too long": lambda s, t: s.unpack(torch.zeros(BYTES + 1, dtype=torch.uint8), [0], t),
    "commit from nowhere": lambda s, t: s.commit([(0, 0), (2, 1)], t),
    "commit to nowhere": lambda s, t: s.commit([(0, 0), (1, -1)], t),
    "write beyond": lambda s, t: s.write([0, 2], [good(), good()], t),
    "too few sources": lambda s, t: s.write([0, 1], [good()], t),
    "too few segments": lambda s, t: s.write([0], [good()[:1]], t),
    "too many segments": lambda s, t: s.write([0], [[*good(), torch.ones(1)]], t),
    "another dtype": lambda s, t: s.write([0], [[torch.ones(2, 2).int(), torch.ones(3)]], t),
    "another shape": lambda s, t: s.write([0], [[torch.ones(4), torch.ones(3)]], t),
    "a strided source": lambda s, t: s.write([0], [[torch.ones(2, 2), torch.ones(6)[::2]]], t),
    "checksums into floats": lambda s, t: s.checksum_slots([0], torch.zeros(1), t),
    "checksums into too few": lambda s, t: s.checksum_slots([0, 1], torch.zeros(1).long(), t),
    "checksums into too many": lambda s, t: s.checksum_staging([0], torch.zeros(2).long(), t),
    "checksums of nothing": lambda s, t: s.checksum_staging([5], torch.zeros(1).long(), t),
}


@pytest.mark.parametrize("call", BAD.values(), ids=BAD.keys())
def test_a_bad_argument_raises_before_any_side_effect(
    call: Callable[[CpuSlotStore, CpuStream], None],
) -> None:
    issued: list[object] = []
    store, stream = store_of_two(), Here(Role.COPY, "here")
    stream._submit = issued.append  # type: ignore[method-assign,assignment]
    with pytest.raises(SlotError):
        call(store, stream)
    assert issued == []


def test_a_private_format_that_is_not_declared_is_unsupported() -> None:
    segment = Segment("w", torch.zeros(4), SlotFormat.PRIVATE)
    with pytest.raises(Unsupported, match="private"):
        CpuSlotStore(SlotLayout(((segment,),), 1))


def test_verbs_are_ordered_on_their_stream_and_keep_the_arguments_of_the_call() -> None:
    store, stream = store_of_two(), CpuStream(Role.COPY, "test")
    gate = threading.Event()
    stream.launch(lambda: gate.wait(SOON))
    blob = torch.zeros(BYTES, dtype=torch.uint8)
    numbers = [1]
    sums = torch.zeros(1, dtype=torch.int64)
    store.pack(numbers, blob, stream)
    store.unpack(blob, numbers, stream)
    store.commit([(1, 0)], stream)
    store.checksum_slots(numbers, sums, stream)
    numbers[0] = 0
    assert not blob.any()
    gate.set()
    stream.synchronize(SOON)
    stream.close(SOON)
    assert torch.equal(store.layout.slots[0][0].data, torch.ones(2, 2))
    packed = torch.cat([segment.data.reshape(-1) for segment in store.layout.slots[1]])
    assert int(sums) & MASK64 == checksum(packed)
