"""The slot store of the CPU: clauses A1, A4, A6, R2."""

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.watchdog import WATCHDOG
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.backends.cpu.slots import CpuSlotStore
from equipoise.backends.cpu.stream import CpuStream
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.checksum import MASK64, checksum
from equipoise.hal.errors import Unsupported
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role

GUARD = 3
"""Elements left and right of every segment that nobody may touch."""
DTYPES = (torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64, torch.bool)
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


class ImmediateStream(CpuStream):
    """A stream that runs everything at once, so that failures surface where they happen."""

    def _submit(self, task: Any) -> None:
        task.run()


IMMEDIATE = ImmediateStream(Role.COPY, "here")


@dataclass
class Rack:
    """A store over segments that stand inside guarded storages."""

    store: CpuSlotStore
    storages: list[list[Tensor]]

    def slot(self, number: int) -> bytes:
        views = [segment.data for segment in self.store.layout.slots[number]]
        return b"".join(bytes_of(view).numpy().tobytes() for view in views)

    def guards(self) -> list[bytes]:
        parts = [part for storages in self.storages for part in storages]
        return [
            bytes_of(p[:GUARD]).numpy().tobytes() + bytes_of(p[-GUARD:]).numpy().tobytes()
            for p in parts
        ]

    def addresses(self) -> list[tuple[int, torch.Size, torch.dtype]]:
        segments = [segment.data for slot in self.store.layout.slots for segment in slot]
        return [(data.data_ptr(), data.shape, data.dtype) for data in segments]


def bytes_of(tensor: Tensor) -> Tensor:
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


@given(racks(), st.data())
def test_write_changes_only_its_slots(rack: Rack, data: st.DataObject) -> None:
    layout = rack.store.layout
    target_slots = data.draw(st.permutations(range(len(layout.slots))).flatmap(prefixes))
    sources = [
        [
            noise(s, int(torch.Size(t.shape).numel()), t.dtype).view(t.shape)
            for t in layout.descriptor
        ]
        for s in target_slots
    ]
    expected = [rack.slot(number) for number in range(len(layout.slots))]
    guards, addresses = rack.guards(), rack.addresses()
    rack.store.write(target_slots, sources, IMMEDIATE)
    for slot, source in zip(target_slots, sources, strict=True):
        expected[slot] = b"".join(bytes_of(part).numpy().tobytes() for part in source)
    assert [rack.slot(number) for number in range(len(layout.slots))] == expected
    assert rack.guards() == guards
    assert rack.addresses() == addresses


def prefixes(order: list[int]) -> st.SearchStrategy[list[int]]:
    return st.integers(0, len(order)).map(lambda size: list(order[:size]))


@settings(max_examples=30)
@given(racks())
def test_slot_round_trip_preserves_bytes(rack: Rack) -> None:
    layout = rack.store.layout
    numbers = range(min(layout.staging, len(layout.slots)))
    blob = torch.empty(len(numbers) * layout.slot_bytes, dtype=torch.uint8)
    before = [rack.slot(number) for number in range(len(layout.slots))]
    rack.store.pack(numbers, blob, IMMEDIATE)
    rack.store.unpack(blob, numbers, IMMEDIATE)
    for slot in layout.slots:
        for segment in slot:
            bytes_of(segment.data).zero_()
    rack.store.commit([(number, number) for number in numbers], IMMEDIATE)
    assert [rack.slot(number) for number in numbers] == before[: len(numbers)]


def store_of_two() -> CpuSlotStore:
    slots = [
        (Segment("a", torch.full((2, 2), float(n))), Segment("b", torch.zeros(3))) for n in range(2)
    ]
    return CpuSlotStore(SlotLayout(tuple(slots), 2))


BYTES = 28


def test_slot_store_refuses_undeclared_private_format() -> None:
    segment = Segment("w", torch.zeros(4), SlotFormat.PRIVATE)
    with pytest.raises(Unsupported, match="private"):
        CpuSlotStore(SlotLayout(((segment,),), 1))


def test_slot_operations_copy_their_arguments_at_call() -> None:
    store, stream = store_of_two(), CpuStream(Role.COPY, "test")
    gate = threading.Event()
    stream.launch(lambda: gate.wait(WATCHDOG))
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
    stream.synchronize(WATCHDOG)
    stream.close(WATCHDOG)
    assert torch.equal(store.layout.slots[0][0].data, torch.ones(2, 2))
    packed = torch.cat([segment.data.reshape(-1) for segment in store.layout.slots[1]])
    assert int(sums) & MASK64 == checksum(packed)
