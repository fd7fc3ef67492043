"""Verbs across streams, readers and leases of the CPU's slots: V2, V4, V5, A2, A11, A12."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.backends.cpu import BACKEND
from equipoise.backends.cpu.accelerator import CpuAccelerator
from equipoise.backends.cpu.slots import CpuSlotStore
from equipoise.backends.cpu.stream import CpuStream
from equipoise.hal.errors import SlotError, SlotLeased, StreamFailed, StreamTimeout
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role

SOON = 20.0
SLOTS, STAGING = 3, 2
Op = tuple[str, int, int, int]


@pytest.fixture
def cpu() -> Iterator[CpuAccelerator]:
    made = BACKEND.open(0)
    yield made
    made.close()


def store_on(cpu: CpuAccelerator) -> CpuSlotStore:
    slots = tuple((Segment("w", torch.zeros(1, dtype=torch.int64)),) for _ in range(SLOTS))
    return cpu.slot_store(SlotLayout(slots, STAGING))


def held(store: CpuSlotStore, slot: int) -> int:
    return int(store.layout.slots[slot][0].data)


def number(value: int) -> Tensor:
    return torch.tensor([value])


VERBS = st.tuples(
    st.sampled_from(["write", "commit", "unpack", "pack"]),
    st.integers(0, len(Role) - 1),
    st.integers(0, SLOTS - 1),
    st.integers(0, STAGING - 1),
)


@settings(max_examples=60)
@given(st.lists(VERBS, max_size=20), st.lists(st.integers(0, 19), max_size=6))
def test_verbs_take_effect_in_the_order_of_issue_whatever_their_streams(
    verbs: list[Op], delayed: list[int]
) -> None:
    """Against one verb after the other; before some verbs their stream is held up."""
    cpu = BACKEND.open(0)
    store, streams = store_on(cpu), [cpu.stream(role) for role in Role]
    slots, staging = [0] * SLOTS, [0] * STAGING
    gates, reads = [], []
    for place, (verb, at, slot, buffer) in enumerate(verbs):
        if place in delayed:
            gates.append(threading.Event())
            streams[at].launch(lambda gate=gates[-1]: gate.wait(SOON))  # type: ignore[misc]
        if verb == "write":
            store.write([slot], [[number(place + 1)]], streams[at])
            slots[slot] = place + 1
        elif verb == "unpack":
            store.unpack(number(place + 1).view(torch.uint8), [buffer], streams[at])
            staging[buffer] = place + 1
        elif verb == "commit":
            store.commit([(buffer, slot)], streams[at])
            slots[slot] = staging[buffer]
        else:
            blob = torch.zeros(8, dtype=torch.uint8)
            store.pack([slot], blob, streams[at])
            reads.append((blob, slots[slot]))
    for gate in reversed(gates):
        gate.set()
    cpu.synchronize(SOON)
    cpu.close()
    assert [held(store, slot) for slot in range(SLOTS)] == slots
    assert [int(blob.view(torch.int64)) for blob, _ in reads] == [value for _, value in reads]


def test_verbs_on_other_slots_do_not_wait(cpu: CpuAccelerator) -> None:
    store, gate = store_on(cpu), threading.Event()
    cpu.stream(Role.COPY).launch(lambda: gate.wait(SOON))
    store.write([0], [[number(1)]], cpu.stream(Role.COPY))
    store.write([1], [[number(2)]], cpu.stream(Role.AUX))
    cpu.stream(Role.AUX).synchronize(SOON)
    assert (held(store, 0), held(store, 1)) == (0, 2)
    gate.set()


def test_two_threads_issue_verbs_each_of_them_whole(cpu: CpuAccelerator) -> None:
    """Commits of both slots against packs of both: no pack sees two versions."""
    store, together, blobs = store_on(cpu), threading.Barrier(2), []

    def write() -> None:
        together.wait(SOON)
        for n in range(60):
            store.write([0, 1], [[number(n)], [number(n)]], cpu.stream(Role.COPY))

    def read() -> None:
        together.wait(SOON)
        for _ in range(60):
            blobs.append(torch.empty(16, dtype=torch.uint8))
            store.pack([0, 1], blobs[-1], cpu.stream(Role.AUX))

    with ThreadPoolExecutor(2) as pool:
        for end in (pool.submit(write), pool.submit(read)):
            end.result(SOON)
    cpu.synchronize(SOON)
    pairs = [blob.view(torch.int64).tolist() for blob in blobs]
    assert all(first == second for first, second in pairs)


def attached(cpu: CpuAccelerator) -> tuple[CpuSlotStore, CpuStream, CpuStream]:
    """A store, an attached reader, and a stream that commits."""
    store, reader = store_on(cpu), cpu.stream(Role.COMPUTE)
    store.attach(reader)
    return store, reader, cpu.stream(Role.COPY)


def test_a_write_waits_for_what_a_reader_has_launched_and_the_reader_for_the_write(
    cpu: CpuAccelerator,
) -> None:
    store, reader, copy = attached(cpu)
    before, writing, seen = threading.Event(), threading.Event(), []
    reader.launch(lambda: before.wait(SOON))
    reader.launch(lambda: seen.append(held(store, 0)))
    copy.launch(lambda: writing.wait(SOON))
    store.write([0], [[number(7)]], copy)
    reader.launch(lambda: seen.append(held(store, 0)))
    writing.set()
    with pytest.raises(StreamTimeout):
        copy.synchronize(0.02)
    assert seen == []
    before.set()
    cpu.synchronize(SOON)
    assert seen == [0, 7]


def test_several_readers_each_see_a_commit_between_two_launches(cpu: CpuAccelerator) -> None:
    store, copy = store_on(cpu), cpu.stream(Role.COPY)
    readers = [cpu.stream(role) for role in (Role.COMPUTE, Role.AUX, Role.COMM)]
    handles = [store.attach(stream) for stream in readers for _ in range(2)]
    seen: dict[Role, list[int]] = {stream.role: [] for stream in readers}

    def look(stream: CpuStream) -> None:
        seen[stream.role].append(held(store, 0))
        seen[stream.role].append(held(store, 1))

    for n in range(5):
        for stream in readers:
            stream.launch(lambda stream=stream: look(stream))  # type: ignore[misc]
        store.write([0, 1], [[number(n)], [number(n)]], copy)
    cpu.synchronize(SOON)
    assert list(seen.values()) == [[0, 0, 0, 0, 1, 1, 2, 2, 3, 3]] * 3
    assert len(handles) == 6


def test_what_a_detached_reader_has_launched_is_still_waited_for(cpu: CpuAccelerator) -> None:
    store, copy, reader = store_on(cpu), cpu.stream(Role.COPY), cpu.stream(Role.COMPUTE)
    gate, seen = threading.Event(), []
    handle = store.attach(reader)
    reader.launch(lambda: gate.wait(SOON))
    reader.launch(lambda: seen.append(held(store, 0)))
    handle.detach()
    handle.detach()
    store.write([0], [[number(1)]], copy)
    gate.set()
    cpu.synchronize(SOON)
    assert seen == [0]
    later = threading.Event()
    reader.launch(lambda: later.wait(SOON))
    store.write([0], [[number(2)]], copy)
    copy.synchronize(SOON)
    assert held(store, 0) == 2
    later.set()


def test_a_commit_on_the_readers_own_stream_needs_no_wait(cpu: CpuAccelerator) -> None:
    store, reader, _ = attached(cpu)
    seen: list[int] = []
    store.write([0], [[number(3)]], reader)
    reader.launch(lambda: seen.append(held(store, 0)))
    reader.synchronize(SOON)
    assert seen == [3]


def test_a_reader_whose_stream_failed_holds_nobody_up(cpu: CpuAccelerator) -> None:
    store, reader, copy = attached(cpu)
    reader.launch(lambda: 1 / 0)
    with pytest.raises(StreamFailed):
        reader.synchronize(SOON)
    store.write([0], [[number(4)]], copy)
    copy.synchronize(SOON)
    assert held(store, 0) == 4


def test_reading_what_a_failed_stream_should_have_written_raises_and_writing_over_it_helps(
    cpu: CpuAccelerator,
) -> None:
    store, copy, aux = store_on(cpu), cpu.stream(Role.COPY), cpu.stream(Role.AUX)
    gate = threading.Event()
    copy.launch(lambda: gate.wait(SOON))
    copy.launch(lambda: 1 / 0)
    store.unpack(number(1).view(torch.uint8), [0], copy)
    gate.set()
    with pytest.raises(StreamFailed):
        copy.synchronize(SOON)
    with pytest.raises(StreamFailed):
        store.commit([(0, 0)], aux)
    aux.synchronize(SOON)
    store.unpack(number(5).view(torch.uint8), [0], aux)
    store.commit([(0, 0)], aux)
    aux.synchronize(SOON)
    assert held(store, 0) == 5


def test_leased_slots_are_neither_committed_nor_written_before_the_last_release(
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
    stream.synchronize(SOON)
    assert [held(store, slot) for slot in range(SLOTS)] == [1, 2, 0]
    with pytest.raises(SlotError, match="slot 3"):
        store.lease([3])


def test_a_leased_slot_may_still_be_read(cpu: CpuAccelerator) -> None:
    store, stream = store_on(cpu), cpu.stream(Role.COPY)
    store.lease([0])
    blob = torch.ones(8, dtype=torch.uint8)
    store.pack([0], blob, stream)
    stream.synchronize(SOON)
    assert not blob.any()


def test_a_verb_within_a_program_waits_in_place_and_holds_no_lock_meanwhile(
    cpu: CpuAccelerator,
) -> None:
    """The program waits for a pack that can only run when another verb has been issued."""
    store, copy, compute = store_on(cpu), cpu.stream(Role.COPY), cpu.stream(Role.COMPUTE)
    gate, waiting, blob = threading.Event(), threading.Event(), torch.ones(8, dtype=torch.uint8)
    opened: list[bool] = []
    copy.launch(lambda: opened.append(gate.wait(SOON / 4)))
    store.pack([0], blob, copy)

    def program() -> None:
        waiting.set()
        store.write([0], [[number(6)]], compute)
        assert held(store, 0) == 6

    compute.launch(program)
    assert waiting.wait(SOON)
    for _ in range(20):  # some of them while the program waits
        store.write([1], [[number(1)]], cpu.stream(Role.AUX))
        time.sleep(0.002)
    gate.set()
    cpu.synchronize(SOON)
    assert opened == [True]
    assert not blob.any()


def test_a_store_converts_nothing(cpu: CpuAccelerator) -> None:
    assert store_on(cpu).conversions == 0


def test_a_stream_of_another_backend_is_refused(cpu: CpuAccelerator) -> None:
    with pytest.raises(TypeError, match="another backend"):
        store_on(cpu).commit([(0, 0)], object())  # type: ignore[arg-type]
