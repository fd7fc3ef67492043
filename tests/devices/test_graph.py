"""Graphs of devices: clauses B7, O3, O6, G3, V4, A11."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from helpers.harnesses.devices import current_stream, device_of, fresh_stream
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.backends.devices import graph as graphs
from equipoise.backends.devices.accelerator import DeviceAccelerator
from equipoise.backends.devices.stream import DeviceStream
from equipoise.hal.errors import (
    EventNotRecorded,
    SlotLeased,
    StreamFailed,
    StreamTimeout,
    Unsupported,
)
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role

BRIEF = 0.05


@pytest.fixture
def stream(device: DeviceAccelerator) -> DeviceStream:
    return device.stream(Role.COMPUTE)


@pytest.fixture
def number(device: DeviceAccelerator) -> Tensor:
    """int64 [1], zero on the device."""
    tensor = torch.zeros(1, dtype=torch.int64, device=device.device)
    current_stream(device).synchronize()
    return tensor


def append(number: Tensor, digit: int) -> None:
    number.mul_(10).add_(digit)


def test_capture_may_make_tensors_between_its_launches(
    device: DeviceAccelerator, stream: DeviceStream, number: Tensor
) -> None:
    """As routers do. The cache has no block of that size: new memory comes from the driver, which
    forbids that to a thread that captures, unless it captures in mode `relaxed`."""
    kept: list[Tensor] = []

    def program() -> None:
        for digit in (1, 2):
            fresh = torch.empty((1 << 26) + digit, dtype=torch.uint8, device=device.device)
            kept.append(fresh)
            stream.launch(partial(append, number, digit))

    graph = device.graph()
    graph.capture(stream, program)
    graph.replay(stream)
    stream.synchronize(WATCHDOG)
    assert int(number) == 12


def test_graph_replays_on_another_stream_and_when_empty(
    device: DeviceAccelerator, stream: DeviceStream, number: Tensor
) -> None:
    graph = device.graph()
    graph.replay(stream)
    graph.capture(stream, lambda: None)
    graph.replay(stream)
    graph.capture(stream, lambda: stream.launch(partial(append, number, 1)))
    graph.replay(device.stream(Role.AUX))
    device.synchronize(WATCHDOG)
    assert int(number) == 1


def test_capture_runs_no_finaliser_of_the_garbage_collector(
    device: DeviceAccelerator, stream: DeviceStream
) -> None:
    class Cycle:
        pass

    def program() -> None:
        garbage = Cycle()
        garbage.itself = garbage  # type: ignore[attr-defined]
        weakref.finalize(garbage, finalised.append, True)
        del garbage
        _ = [[] for _ in range(10 * gc.get_threshold()[0])]
        during.extend(finalised)

    finalised: list[bool] = []
    during: list[bool] = []
    device.graph().capture(stream, program)
    assert gc.isenabled()
    gc.collect()
    assert (during, finalised) == ([], [True])


def test_capture_records_only_own_stream_and_thread(
    device: DeviceAccelerator, stream: DeviceStream, number: Tensor
) -> None:
    other, graph, second = device.stream(Role.AUX), device.graph(), torch.zeros_like(number)
    current_stream(device).synchronize()

    def program() -> None:
        stream.launch(partial(append, number, 1))
        other.launch(partial(append, second, 2))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(stream.launch, partial(append, number, 3)).result(WATCHDOG)
            pool.submit(stream.synchronize, WATCHDOG).result(WATCHDOG)

    graph.capture(stream, program)
    device.synchronize(WATCHDOG)
    assert [int(number), int(second)] == [3, 2]
    graph.replay(stream)
    stream.synchronize(WATCHDOG)
    assert [int(number), int(second)] == [31, 2]


def test_failed_capture_leaves_graph_and_stream_unchanged(
    device: DeviceAccelerator, stream: DeviceStream, number: Tensor
) -> None:
    graph = device.graph()
    graph.capture(stream, lambda: stream.launch(partial(append, number, 1)))

    def program() -> None:
        stream.launch(partial(append, number, 2))
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError):
        graph.capture(stream, program)
    stream.launch(partial(append, number, 3))
    graph.replay(stream)
    stream.synchronize(WATCHDOG)
    assert int(number) == 31
    again = device.graph()
    again.capture(stream, lambda: stream.launch(partial(append, number, 4)))


def test_captured_event_is_recorded_at_each_replay(
    device: DeviceAccelerator, stream: DeviceStream, number: Tensor
) -> None:
    other, graph, event, lock = (
        device.stream(Role.AUX),
        device.graph(),
        device.event(),
        device.stream_lock(WATCHDOG),
    )

    def program() -> None:
        lock.acquire(stream)
        stream.record(event)
        lock.release(stream)

    graph.capture(stream, program)
    with pytest.raises(EventNotRecorded):
        other.wait(event)
    for turn in range(2):
        graph.replay(stream)
        other.wait(event)
        other.launch(partial(append, number, 1))
        with pytest.raises(StreamTimeout):
            other.synchronize(BRIEF)
        lock.signal(0)
        other.synchronize(WATCHDOG)
        assert int(number) == (1, 11)[turn]
        lock.wait(0, WATCHDOG)


def test_captured_wait_uses_event_point_at_replay(
    device: DeviceAccelerator, stream: DeviceStream, number: Tensor
) -> None:
    other, graph, event, lock = (
        device.stream(Role.AUX),
        device.graph(),
        device.event(),
        device.stream_lock(WATCHDOG),
    )
    other.record(event)

    def program() -> None:
        stream.wait(event)
        stream.launch(partial(append, number, 1))

    graph.capture(stream, program)
    lock.acquire(other)
    other.record(event)
    graph.replay(stream)
    with pytest.raises(StreamTimeout):
        stream.synchronize(BRIEF)
    lock.signal(0)
    stream.synchronize(WATCHDOG)
    assert int(number) == 1


def test_capture_refuses_wait_for_unrecorded_event(
    device: DeviceAccelerator, stream: DeviceStream
) -> None:
    graph, event = device.graph(), device.event()
    with pytest.raises(EventNotRecorded):
        graph.capture(stream, lambda: stream.wait(event))
    graph.capture(stream, lambda: (stream.record(event), stream.wait(event)))
    graph.replay(stream)
    stream.synchronize(WATCHDOG)


def test_captured_commit_keeps_order_and_leases_at_replay(
    device: DeviceAccelerator, stream: DeviceStream
) -> None:
    """It waits for the staging that another stream still fills, and leases forbid it."""
    slot = torch.zeros(64, dtype=torch.uint8, device=device.device)
    current_stream(device).synchronize()
    store, graph = device.slot_store(SlotLayout(((Segment("w", slot),),), 1)), device.graph()
    graph.capture(stream, lambda: store.commit([(0, 0)], stream))
    copy, lock = device.stream(Role.COPY), device.stream_lock(WATCHDOG)
    for turn in range(1, 3):
        lock.acquire(copy)
        store.unpack(device.pinned(64).fill_(turn), [0], copy)
        lock.release(copy)
        graph.replay(stream)
        with pytest.raises(StreamTimeout):
            stream.synchronize(BRIEF)
        lock.signal(0)
        lock.wait(0, WATCHDOG)
        stream.synchronize(WATCHDOG)
        assert set(slot.tolist()) == {turn}
    lease = store.lease([0])
    with pytest.raises(SlotLeased):
        graph.replay(stream)
    lease.release()
    graph.replay(stream)
    stream.synchronize(WATCHDOG)


def test_reader_replay_is_atomic_to_commit(device: DeviceAccelerator, stream: DeviceStream) -> None:
    """Looks before and after a wait inside the graph see one version."""
    slot = torch.zeros(64, dtype=torch.uint8, device=device.device)
    looks = torch.zeros(2, 64, dtype=torch.uint8, device=device.device)
    current_stream(device).synchronize()
    store, graph, event = (
        device.slot_store(SlotLayout(((Segment("w", slot),),), 1)),
        device.graph(),
        device.event(),
    )
    reader = store.attach(stream)

    def program() -> None:
        stream.launch(partial(looks[0].copy_, slot))
        stream.record(event)
        stream.wait(event)
        stream.launch(partial(looks[1].copy_, slot))

    graph.capture(stream, program)
    for version in range(1, 6):
        store.write([0], [[device.pinned(64).fill_(version)]], device.stream(Role.COPY))
        graph.replay(stream)
    device.synchronize(WATCHDOG)
    assert set(looks.flatten().tolist()) == {5}
    reader.detach()


def test_dropped_graph_lives_until_last_replay_ends(
    device: DeviceAccelerator, stream: DeviceStream, number: Tensor
) -> None:
    graph, lock = device.graph(), device.stream_lock(WATCHDOG)
    graph.capture(stream, lambda: stream.launch(partial(append, number, 1)))
    (part,) = graph._body.parts
    vendor = weakref.ref(part)
    lock.acquire(stream)
    graph.replay(stream)
    del graph, part
    graphs.release_dropped()
    gc.collect()
    assert vendor() is not None
    lock.signal(0)
    device.synchronize(WATCHDOG)
    gc.collect()
    assert vendor() is None
    assert int(number) == 1


def test_capture_refuses_synchronize_and_nested_graphs(
    device: DeviceAccelerator, stream: DeviceStream
) -> None:
    graph, inner = device.graph(), device.graph()
    for program in (
        lambda: stream.synchronize(WATCHDOG),
        lambda: inner.capture(stream, lambda: None),
        lambda: inner.replay(stream),
        lambda: inner.capture(device.stream(Role.AUX), lambda: None),
    ):
        with pytest.raises(Unsupported):
            graph.capture(stream, program)


def test_replay_on_failed_stream_raises(
    device: DeviceAccelerator, stream: DeviceStream, number: Tensor
) -> None:
    graph = device.graph()
    graph.capture(stream, lambda: stream.launch(partial(append, number, 1)))
    stream.launch(lambda: 1 / 0)
    with pytest.raises(StreamFailed):
        graph.replay(stream)
    graph.replay(device.stream(Role.AUX))
    device.stream(Role.AUX).synchronize(WATCHDOG)
    assert int(number) == 1


def test_engine_capture_takes_launches_but_refuses_lock_and_commit(
    device: DeviceAccelerator, number: Tensor
) -> None:
    theirs, runtime = fresh_stream(device), device_of(device).runtime
    adopted, lock = device.adopt(theirs), device.stream_lock(WATCHDOG)
    store = device.slot_store(SlotLayout(((Segment("w", number),),), 1))
    with runtime.current(theirs):
        graph = runtime.begin_capture()
        adopted.launch(partial(append, number, 1))
        with pytest.raises(Unsupported, match="an engine captures this stream"):
            lock.acquire(adopted)
        assert lock._borrowed_flags == set()
        with pytest.raises(Unsupported, match="an engine captures this stream"):
            store.commit([(0, 0)], adopted)
        runtime.end_capture(graph)
        for _ in range(2):
            graph.replay()
    adopted.synchronize(WATCHDOG)
    assert int(number) == 11
