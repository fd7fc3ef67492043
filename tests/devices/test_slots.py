"""Slots in device memory: clauses A1, A4, A6 to A8, A10, K1, V5."""

from collections.abc import Sequence

import pytest
import torch
from helpers.harnesses.devices import current_stream
from helpers.watchdog import WATCHDOG

from equipoise.backends.devices.accelerator import DeviceAccelerator
from equipoise.backends.devices.slots import DeviceSlotStore
from equipoise.hal.checksum import as_int64, checksum
from equipoise.hal.errors import SlotError
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role

SLOTS = 3


def settled(device: DeviceAccelerator) -> None:
    current_stream(device).synchronize()


def store_of(device: DeviceAccelerator, *shapes: Sequence[int], offset: int = 0) -> DeviceSlotStore:
    """Slots with segments `offset` bytes off the alignment, each byte its slot's number."""
    rows = []
    for slot in range(SLOTS):
        segments = []
        for number, shape in enumerate(shapes):
            nbytes = torch.Size(shape).numel()
            whole = torch.full((offset + nbytes,), slot, dtype=torch.uint8, device=device.device)
            segments.append(Segment(f"part{number}", whole[offset:].view(tuple(shape))))
        rows.append(tuple(segments))
    settled(device)
    return device.slot_store(SlotLayout(tuple(rows), staging=2))


def bytes_of(store: DeviceSlotStore, slot: int) -> list[int]:
    return [int(x) for segment in store.layout.slots[slot] for x in segment.data.flatten().tolist()]


@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_slot_operations_move_bytes_at_any_offset(device: DeviceAccelerator, offset: int) -> None:
    store, stream = store_of(device, (2, 3), (5,), offset=offset), device.stream(Role.COPY)
    blob = torch.empty(2 * 11, dtype=torch.uint8, device=device.device)
    store.pack([1, 2], blob, stream)
    store.unpack(blob, [0, 1], stream)
    store.commit([(0, 2), (1, 0)], stream)
    stream.synchronize(WATCHDOG)
    assert [bytes_of(store, slot) for slot in range(SLOTS)] == [[2] * 11, [1] * 11, [1] * 11]
    assert store.conversions == 0


def test_staging_is_zeroed_before_any_stream_reads_it(device: DeviceAccelerator) -> None:
    store = store_of(device, (8,))
    stream = device.stream(Role.AUX)
    store.commit([(0, 1)], stream)
    stream.synchronize(WATCHDOG)
    assert bytes_of(store, 1) == [0] * 8


def test_slot_operation_operands_may_be_dropped_at_once(
    device: DeviceAccelerator,
) -> None:
    """Blobs and sources on the device, the stream held meanwhile: the allocator must not reuse."""
    store, stream, lock = (
        store_of(device, (512,)),
        device.stream(Role.COPY),
        device.stream_lock(WATCHDOG),
    )
    lock.acquire(stream)
    for slot in range(SLOTS):
        source = torch.full((512,), 40 + slot, dtype=torch.uint8, device=device.device)
        blob = torch.full((512,), 50 + slot, dtype=torch.uint8, device=device.device)
        settled(device)
        store.write([slot], [[source]], stream)
        store.unpack(blob, [slot % 2], stream)
        del source, blob
        junk = [torch.full((512,), 99, dtype=torch.uint8, device=device.device) for _ in range(4)]
        settled(device)
        del junk
    store.commit([(1, 0)], stream)
    lock.signal(0)
    device.synchronize(WATCHDOG)
    assert [set(bytes_of(store, slot)) for slot in range(SLOTS)] == [{51}, {41}, {42}]


def test_write_reads_pinned_memory_on_stream_and_pageable_at_call(
    device: DeviceAccelerator,
) -> None:
    store, stream, lock = (
        store_of(device, (8,)),
        device.stream(Role.COPY),
        device.stream_lock(WATCHDOG),
    )
    pinned, pageable = device.pinned(8).fill_(1), torch.full((8,), 2, dtype=torch.uint8)
    assert pinned.is_pinned()
    assert not pageable.is_pinned()
    lock.acquire(stream)
    store.write([0], [[pinned]], stream)
    store.write([1], [[pageable]], stream)
    pinned.fill_(3)
    pageable.fill_(4)
    lock.signal(0)
    stream.synchronize(WATCHDOG)
    assert [bytes_of(store, 0), bytes_of(store, 1)] == [[3] * 8, [2] * 8]


def test_dropped_pinned_memory_is_not_reused_under_copy(
    device: DeviceAccelerator,
) -> None:
    store, stream, lock = (
        store_of(device, (512,)),
        device.stream(Role.COPY),
        device.stream_lock(WATCHDOG),
    )
    lock.acquire(stream)
    store.write([0], [[device.pinned(512).fill_(7)]], stream)
    for _ in range(4):
        device.pinned(512).fill_(9)
    lock.signal(0)
    stream.synchronize(WATCHDOG)
    assert bytes_of(store, 0) == [7] * 512


def test_slot_store_refuses_unpinned_host_output(device: DeviceAccelerator) -> None:
    store, stream = store_of(device, (8,)), device.stream(Role.COPY)
    with pytest.raises(SlotError, match="pinned"):
        store.pack([0], torch.empty(8, dtype=torch.uint8), stream)
    with pytest.raises(SlotError, match="pinned"):
        store.checksum_slots([0], torch.empty(1, dtype=torch.int64), stream)
    blob = device.pinned(8)
    store.pack([2], blob, stream)
    stream.synchronize(WATCHDOG)
    assert blob.tolist() == [2] * 8


def test_slot_checksums_equal_the_definition(device: DeviceAccelerator) -> None:
    store, stream = store_of(device, (3,), (4, 1), offset=1), device.stream(Role.COPY)
    slots, staging = (torch.zeros(2, dtype=torch.int64, device=device.device) for _ in range(2))
    settled(device)
    store.checksum_slots([2, 1], slots, stream)
    store.checksum_staging([1, 0], staging, stream)
    stream.synchronize(WATCHDOG)
    expected = [as_int64(checksum(torch.full((7,), n, dtype=torch.uint8))) for n in (2, 1, 0)]
    assert slots.tolist() == expected[:2]
    assert staging.tolist() == [expected[2]] * 2
