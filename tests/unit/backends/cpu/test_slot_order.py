"""Operations across streams and threads, and leases of the CPU's slots: clauses V4, V5, A11."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.backends.cpu import BACKEND
from equipoise.backends.cpu.accelerator import CpuAccelerator
from equipoise.backends.cpu.slots import CpuSlotStore
from equipoise.backends.cpu.stream import CpuStream
from equipoise.hal.errors import SlotError, SlotLeased, StreamFailed
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role

SLOTS, STAGING = 3, 2


@pytest.fixture
def cpu() -> Iterator[CpuAccelerator]:
    accelerator = BACKEND.open(0)
    yield accelerator
    accelerator.close()


def store_on(cpu: CpuAccelerator) -> CpuSlotStore:
    slots = tuple((Segment("w", torch.zeros(1, dtype=torch.int64)),) for _ in range(SLOTS))
    return cpu.slot_store(SlotLayout(slots, STAGING))


def slot_value(store: CpuSlotStore, slot: int) -> int:
    return int(store.layout.slots[slot][0].data)


def number(value: int) -> Tensor:
    return torch.tensor([value])


def test_slot_operations_on_other_slots_do_not_wait(cpu: CpuAccelerator) -> None:
    store, gate = store_on(cpu), threading.Event()
    cpu.stream(Role.COPY).launch(lambda: gate.wait(WATCHDOG))
    store.write([0], [[number(1)]], cpu.stream(Role.COPY))
    store.write([1], [[number(2)]], cpu.stream(Role.AUX))
    cpu.stream(Role.AUX).synchronize(WATCHDOG)
    assert (slot_value(store, 0), slot_value(store, 1)) == (0, 2)
    gate.set()


def test_concurrent_slot_operations_are_atomic(cpu: CpuAccelerator) -> None:
    """Commits of both slots against packs of both: no pack sees two versions."""
    store, together, blobs = store_on(cpu), threading.Barrier(2), []

    def write() -> None:
        together.wait(WATCHDOG)
        for n in range(60):
            store.write([0, 1], [[number(n)], [number(n)]], cpu.stream(Role.COPY))

    def read() -> None:
        together.wait(WATCHDOG)
        for _ in range(60):
            blobs.append(torch.empty(16, dtype=torch.uint8))
            store.pack([0, 1], blobs[-1], cpu.stream(Role.AUX))

    with ThreadPoolExecutor(2) as pool:
        for end in (pool.submit(write), pool.submit(read)):
            end.result(WATCHDOG)
    cpu.synchronize(WATCHDOG)
    pairs = [blob.view(torch.int64).tolist() for blob in blobs]
    assert all(first == second for first, second in pairs)


def store_with_reader(cpu: CpuAccelerator) -> tuple[CpuSlotStore, CpuStream, CpuStream]:
    """A store, an attached reader, and a stream that commits."""
    store, reader = store_on(cpu), cpu.stream(Role.COMPUTE)
    store.attach(reader)
    return store, reader, cpu.stream(Role.COPY)


def test_commit_of_failed_unpack_raises_until_overwritten(
    cpu: CpuAccelerator,
) -> None:
    store, copy, aux = store_on(cpu), cpu.stream(Role.COPY), cpu.stream(Role.AUX)
    gate = threading.Event()
    copy.launch(lambda: gate.wait(WATCHDOG))
    copy.launch(lambda: 1 / 0)
    store.unpack(number(1).view(torch.uint8), [0], copy)
    gate.set()
    with pytest.raises(StreamFailed):
        copy.synchronize(WATCHDOG)
    with pytest.raises(StreamFailed):
        store.commit([(0, 0)], aux)
    aux.synchronize(WATCHDOG)
    store.unpack(number(5).view(torch.uint8), [0], aux)
    store.commit([(0, 0)], aux)
    aux.synchronize(WATCHDOG)
    assert slot_value(store, 0) == 5


def test_leased_slots_refuse_commit_and_write_until_release(
    cpu: CpuAccelerator,
) -> None:
    store, stream = store_on(cpu), cpu.stream(Role.COMPUTE)
    leases = [store.lease([0, 1]), store.lease([1])]
    assert leases[0].slots == (0, 1)
    for slot in (0, 1):
        with pytest.raises(SlotLeased, match=f"slot\\(s\\) {slot} are leased"):
            store.write([2, slot], [[number(9)], [number(9)]], stream)
    leases[0].release()
    leases[0].release()
    with pytest.raises(SlotLeased):
        store.commit([(0, 1)], stream)
    store.write([0], [[number(1)]], stream)
    leases[1].release()
    store.write([1], [[number(2)]], stream)
    stream.synchronize(WATCHDOG)
    assert [slot_value(store, slot) for slot in range(SLOTS)] == [1, 2, 0]
    with pytest.raises(SlotError, match="slot 3"):
        store.lease([3])


def test_slot_operation_within_program_waits_without_holding_lock(
    cpu: CpuAccelerator,
) -> None:
    """The program waits for a pack that can only run when another operation has been issued."""
    store, copy, compute = store_on(cpu), cpu.stream(Role.COPY), cpu.stream(Role.COMPUTE)
    gate, waiting, blob = threading.Event(), threading.Event(), torch.ones(8, dtype=torch.uint8)
    gate_results: list[bool] = []
    copy.launch(lambda: gate_results.append(gate.wait(WATCHDOG)))
    store.pack([0], blob, copy)

    def program() -> None:
        waiting.set()
        store.write([0], [[number(6)]], compute)
        assert slot_value(store, 0) == 6

    compute.launch(program)
    assert waiting.wait(WATCHDOG)
    for _ in range(20):  # some of them while the program waits
        store.write([1], [[number(1)]], cpu.stream(Role.AUX))
        time.sleep(0.002)
    gate.set()
    cpu.synchronize(WATCHDOG)
    assert gate_results == [True]
    assert not blob.any()


def test_slot_store_refuses_foreign_stream(cpu: CpuAccelerator) -> None:
    with pytest.raises(TypeError, match="another backend"):
        store_on(cpu).commit([(0, 0)], object())  # type: ignore[arg-type]
