"""Graphs of the CPU: clauses B7, O3, O6, G3, V4."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.watchdog import WATCHDOG

from equipoise.backends.cpu import BACKEND
from equipoise.backends.cpu.accelerator import CpuAccelerator
from equipoise.hal.errors import EventNotRecorded, SlotLeased, StreamTimeout, Unsupported
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role


@pytest.fixture
def cpu() -> Iterator[CpuAccelerator]:
    accelerator = BACKEND.open(0)
    yield accelerator
    accelerator.close()


def test_graph_replays_on_another_stream(cpu: CpuAccelerator) -> None:
    graph, where = cpu.graph(), []
    stream = cpu.stream(Role.COMPUTE)
    graph.capture(
        stream, lambda: stream.launch(lambda: where.append(threading.current_thread().name))
    )
    graph.replay(cpu.stream(Role.AUX))
    cpu.synchronize(WATCHDOG)
    assert where == ["cpu:0.aux"]


def test_capture_records_only_own_stream_and_thread(cpu: CpuAccelerator) -> None:
    stream, other, graph, log = cpu.stream(Role.COMPUTE), cpu.stream(Role.AUX), cpu.graph(), []

    def program() -> None:
        stream.launch(lambda: log.append("captured"))
        other.launch(lambda: log.append("another stream"))
        other.synchronize(WATCHDOG)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(stream.launch, lambda: log.append("another thread")).result(WATCHDOG)

    graph.capture(stream, program)
    stream.synchronize(WATCHDOG)
    assert log == ["another stream", "another thread"]
    graph.replay(stream)
    stream.synchronize(WATCHDOG)
    assert log[2:] == ["captured"]


def test_failed_capture_leaves_graph_and_stream_unchanged(cpu: CpuAccelerator) -> None:
    stream, graph, log = cpu.stream(Role.COMPUTE), cpu.graph(), []
    graph.capture(stream, lambda: stream.launch(lambda: log.append("first")))

    def program() -> None:
        stream.launch(lambda: log.append("second"))
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError):
        graph.capture(stream, program)
    stream.launch(lambda: log.append("eager"))
    graph.replay(stream)
    stream.synchronize(WATCHDOG)
    assert log == ["eager", "first"]


def test_captured_event_is_recorded_at_each_replay(cpu: CpuAccelerator) -> None:
    stream, other, graph, log = cpu.stream(Role.COMPUTE), cpu.stream(Role.AUX), cpu.graph(), []
    gate, event = threading.Semaphore(0), cpu.event()

    def program() -> None:
        stream.launch(lambda: gate.acquire(timeout=WATCHDOG))
        stream.record(event)

    graph.capture(stream, program)
    with pytest.raises(EventNotRecorded):
        other.wait(event)
    for number in range(2):
        graph.replay(stream)
        other.wait(event)
        other.launch(lambda number=number: log.append(number))  # type: ignore[misc]
        with pytest.raises(StreamTimeout):
            other.synchronize(0.02)
        gate.release()
        other.synchronize(WATCHDOG)
        assert log == list(range(number + 1))


def test_captured_wait_uses_event_point_at_replay(
    cpu: CpuAccelerator,
) -> None:
    stream, other, graph, log = cpu.stream(Role.COMPUTE), cpu.stream(Role.AUX), cpu.graph(), []
    gate, event = threading.Event(), cpu.event()
    other.record(event)

    def program() -> None:
        stream.wait(event)
        stream.launch(lambda: log.append(1))

    graph.capture(stream, program)
    other.launch(lambda: gate.wait(WATCHDOG))
    other.record(event)
    graph.replay(stream)
    with pytest.raises(StreamTimeout):
        stream.synchronize(0.02)
    gate.set()
    stream.synchronize(WATCHDOG)
    assert log == [1]


def test_capture_refuses_wait_for_unrecorded_event(
    cpu: CpuAccelerator,
) -> None:
    stream, graph, event = cpu.stream(Role.COMPUTE), cpu.graph(), cpu.event()
    with pytest.raises(EventNotRecorded):
        graph.capture(stream, lambda: stream.wait(event))

    def in_order() -> None:
        stream.record(event)
        stream.wait(event)

    graph.capture(stream, in_order)
    graph.replay(stream)
    stream.synchronize(WATCHDOG)
    assert event.query()


def test_captured_stream_refuses_synchronize_and_second_capture(
    cpu: CpuAccelerator,
) -> None:
    stream, graph = cpu.stream(Role.COMPUTE), cpu.graph()
    with pytest.raises(Unsupported, match="cannot be synchronised"):
        graph.capture(stream, lambda: stream.synchronize(WATCHDOG))
    with pytest.raises(Unsupported, match="captured already"):
        graph.capture(stream, lambda: cpu.graph().capture(stream, lambda: None))
    stream.synchronize(WATCHDOG)


def test_replay_within_capture_is_captured(cpu: CpuAccelerator) -> None:
    stream, inner, outer, log = cpu.stream(Role.COMPUTE), cpu.graph(), cpu.graph(), []
    inner.capture(stream, lambda: stream.launch(lambda: log.append(1)))

    def program() -> None:
        inner.replay(stream)
        inner.replay(stream)

    outer.capture(stream, program)
    stream.synchronize(WATCHDOG)
    assert log == []
    outer.replay(stream)
    stream.synchronize(WATCHDOG)
    assert log == [1, 1]


def test_replay_within_program_runs_in_place(cpu: CpuAccelerator) -> None:
    stream, graph, log = cpu.stream(Role.COMPUTE), cpu.graph(), []
    graph.capture(stream, lambda: stream.launch(lambda: log.append("graph")))

    def program() -> None:
        graph.replay(stream)
        log.append("program")

    stream.launch(program)
    stream.synchronize(WATCHDOG)
    assert log == ["graph", "program"]


def test_captured_kernels_and_slot_operations_read_state_at_replay(
    cpu: CpuAccelerator,
) -> None:
    stream, graph = cpu.stream(Role.COMPUTE), cpu.graph()
    slots = tuple((Segment("w", torch.zeros(4)),) for _ in range(2))
    store = cpu.slot_store(SlotLayout(slots, 1))
    ids, counts = torch.tensor([0, 1, 1], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    blob = torch.empty(16, dtype=torch.uint8)

    def program() -> None:
        store.commit([(0, 0)], stream)
        store.pack([0], blob, stream)
        cpu.kernels.count(ids, counts, stream)

    graph.capture(stream, program)
    copy = cpu.stream(Role.COPY)
    for number in (1.0, 2.0):
        store.unpack(torch.full((4,), number).view(torch.uint8), [0], copy)
        graph.replay(stream)
        stream.synchronize(WATCHDOG)
        assert blob.view(torch.float32).tolist() == [number] * 4
    assert counts.tolist() == [1, 2]


def test_replay_on_leased_slot_launches_nothing(cpu: CpuAccelerator) -> None:
    stream, graph, log = cpu.stream(Role.COMPUTE), cpu.graph(), []
    store = cpu.slot_store(SlotLayout(((Segment("w", torch.zeros(4)),),), 1))

    def program() -> None:
        stream.launch(lambda: log.append(1))
        store.commit([(0, 0)], stream)

    graph.capture(stream, program)
    lease = store.lease([0])
    with pytest.raises(SlotLeased):
        graph.replay(stream)
    stream.synchronize(WATCHDOG)
    assert log == []
    lease.release()
    graph.replay(stream)
    stream.synchronize(WATCHDOG)
    assert log == [1]


def test_commit_is_atomic_to_reader_replay(cpu: CpuAccelerator) -> None:
    """Two threads: one replays a reader of two launches, the other commits."""
    reader, copy, graph = cpu.stream(Role.COMPUTE), cpu.stream(Role.COPY), cpu.graph()
    slot = torch.zeros(1)
    store = cpu.slot_store(SlotLayout(((Segment("w", slot),),), 1))
    store.attach(reader)
    values: list[float] = []

    def program() -> None:
        for _ in range(2):
            reader.launch(lambda: values.append(float(slot)))

    graph.capture(reader, program)
    rounds, together = 60, threading.Barrier(2)

    def replay() -> None:
        together.wait(WATCHDOG)
        for _ in range(rounds):
            graph.replay(reader)

    def commit() -> None:
        together.wait(WATCHDOG)
        for number in range(rounds):
            store.unpack(torch.tensor([float(number)]).view(torch.uint8), [0], copy)
            store.commit([(0, 0)], copy)

    with ThreadPoolExecutor(2) as pool:
        for end in (pool.submit(replay), pool.submit(commit)):
            end.result(WATCHDOG)
    cpu.synchronize(WATCHDOG)
    assert values[::2] == values[1::2]
    assert len(values) == 2 * rounds
