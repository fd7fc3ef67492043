"""Graphs of the NPU: clauses B7, O3, O6, G3, V4, A11."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor

from equipoise.backends.ascend import native
from equipoise.backends.ascend.accelerator import AscendAccelerator
from equipoise.backends.devices import graph as graphs
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

pytestmark = pytest.mark.npusim
SOON = 20.0
BRIEF = 0.05


@pytest.fixture
def stream(npu: AscendAccelerator) -> DeviceStream:
    return npu.stream(Role.COMPUTE)


@pytest.fixture
def number(npu: AscendAccelerator) -> Tensor:
    """int64 [1], zero on the device."""
    made = torch.zeros(1, dtype=torch.int64, device=npu.device)
    native.npu().current_stream().synchronize()
    return made


def append(number: Tensor, digit: int) -> None:
    number.mul_(10).add_(digit)


def test_what_is_captured_runs_at_each_replay_and_never_before(
    npu: AscendAccelerator, stream: DeviceStream, number: Tensor
) -> None:
    graph = npu.graph()

    def program() -> None:
        for digit in (1, 2):
            stream.launch(partial(append, number, digit))

    graph.capture(stream, program)
    stream.synchronize(SOON)
    assert int(number) == 0
    for _ in range(2):
        graph.replay(stream)
    stream.synchronize(SOON)
    assert int(number) == 1212


def test_a_graph_may_be_replayed_on_another_stream_and_an_empty_one_does_nothing(
    npu: AscendAccelerator, stream: DeviceStream, number: Tensor
) -> None:
    graph = npu.graph()
    graph.replay(stream)
    graph.capture(stream, lambda: None)
    graph.replay(stream)
    graph.capture(stream, lambda: stream.launch(partial(append, number, 1)))
    graph.replay(npu.stream(Role.AUX))
    npu.synchronize(SOON)
    assert int(number) == 1


def test_only_what_the_thread_launches_on_that_stream_is_captured(
    npu: AscendAccelerator, stream: DeviceStream, number: Tensor
) -> None:
    other, graph, second = npu.stream(Role.AUX), npu.graph(), torch.zeros_like(number)
    native.npu().current_stream().synchronize()

    def program() -> None:
        stream.launch(partial(append, number, 1))
        other.launch(partial(append, second, 2))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(stream.launch, partial(append, number, 3)).result(SOON)
            pool.submit(stream.synchronize, SOON).result(SOON)

    graph.capture(stream, program)
    npu.synchronize(SOON)
    assert [int(number), int(second)] == [3, 2]
    graph.replay(stream)
    stream.synchronize(SOON)
    assert [int(number), int(second)] == [31, 2]


def test_a_program_that_raises_leaves_graph_and_stream_as_they_were(
    npu: AscendAccelerator, stream: DeviceStream, number: Tensor
) -> None:
    graph = npu.graph()
    graph.capture(stream, lambda: stream.launch(partial(append, number, 1)))

    def program() -> None:
        stream.launch(partial(append, number, 2))
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError):
        graph.capture(stream, program)
    stream.launch(partial(append, number, 3))
    graph.replay(stream)
    stream.synchronize(SOON)
    assert int(number) == 31
    again = npu.graph()
    again.capture(stream, lambda: stream.launch(partial(append, number, 4)))


def test_a_captured_event_is_recorded_at_each_replay(
    npu: AscendAccelerator, stream: DeviceStream, number: Tensor
) -> None:
    other, graph, event, lock = (
        npu.stream(Role.AUX),
        npu.graph(),
        npu.event(),
        npu.stream_lock(SOON),
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
        other.synchronize(SOON)
        assert int(number) == (1, 11)[turn]
        lock.wait(0, SOON)


def test_a_captured_wait_is_for_the_point_that_is_current_at_the_replay(
    npu: AscendAccelerator, stream: DeviceStream, number: Tensor
) -> None:
    other, graph, event, lock = (
        npu.stream(Role.AUX),
        npu.graph(),
        npu.event(),
        npu.stream_lock(SOON),
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
    stream.synchronize(SOON)
    assert int(number) == 1


def test_capturing_a_wait_for_an_event_that_nobody_ever_records_raises(
    npu: AscendAccelerator, stream: DeviceStream
) -> None:
    graph, event = npu.graph(), npu.event()
    with pytest.raises(EventNotRecorded):
        graph.capture(stream, lambda: stream.wait(event))
    graph.capture(stream, lambda: (stream.record(event), stream.wait(event)))
    graph.replay(stream)
    stream.synchronize(SOON)


def test_a_captured_commit_is_in_its_turn_at_every_replay(
    npu: AscendAccelerator, stream: DeviceStream
) -> None:
    """It waits for the staging that another stream still fills, and leases forbid it."""
    slot = torch.zeros(64, dtype=torch.uint8, device=npu.device)
    native.npu().current_stream().synchronize()
    store, graph = npu.slot_store(SlotLayout(((Segment("w", slot),),), 1)), npu.graph()
    graph.capture(stream, lambda: store.commit([(0, 0)], stream))
    copy, lock = npu.stream(Role.COPY), npu.stream_lock(SOON)
    for turn in range(1, 3):
        lock.acquire(copy)
        store.unpack(npu.pinned(64).fill_(turn), [0], copy)
        lock.release(copy)
        graph.replay(stream)
        with pytest.raises(StreamTimeout):
            stream.synchronize(BRIEF)
        lock.signal(0)
        lock.wait(0, SOON)
        stream.synchronize(SOON)
        assert set(slot.tolist()) == {turn}
    lease = store.lease([0])
    with pytest.raises(SlotLeased):
        graph.replay(stream)
    lease.release()
    graph.replay(stream)
    stream.synchronize(SOON)


def test_a_replay_is_one_launch_to_an_attached_readers_commit(
    npu: AscendAccelerator, stream: DeviceStream
) -> None:
    """Looks before and after a wait inside the graph see one version."""
    slot = torch.zeros(64, dtype=torch.uint8, device=npu.device)
    seen = torch.zeros(2, 64, dtype=torch.uint8, device=npu.device)
    native.npu().current_stream().synchronize()
    store, graph, event = (
        npu.slot_store(SlotLayout(((Segment("w", slot),),), 1)),
        npu.graph(),
        npu.event(),
    )
    reader = store.attach(stream)

    def program() -> None:
        stream.launch(partial(seen[0].copy_, slot))
        stream.record(event)
        stream.wait(event)
        stream.launch(partial(seen[1].copy_, slot))

    graph.capture(stream, program)
    for version in range(1, 6):
        store.write([0], [[npu.pinned(64).fill_(version)]], npu.stream(Role.COPY))
        graph.replay(stream)
    npu.synchronize(SOON)
    assert set(seen.flatten().tolist()) == {5}
    reader.detach()


def test_a_dropped_graph_lives_until_its_last_replay_has_passed(
    npu: AscendAccelerator, stream: DeviceStream, number: Tensor
) -> None:
    graph, lock = npu.graph(), npu.stream_lock(SOON)
    graph.capture(stream, lambda: stream.launch(partial(append, number, 1)))
    (part,) = graph._body.parts
    vendor = weakref.ref(part)
    lock.acquire(stream)
    graph.replay(stream)
    del graph, part
    graphs.sweep()
    gc.collect()
    assert vendor() is not None
    lock.signal(0)
    npu.synchronize(SOON)
    gc.collect()
    assert vendor() is None
    assert int(number) == 1


def test_what_cannot_be_captured_is_refused(npu: AscendAccelerator, stream: DeviceStream) -> None:
    graph, inner = npu.graph(), npu.graph()
    for program in (
        lambda: stream.synchronize(SOON),
        lambda: inner.capture(stream, lambda: None),
        lambda: inner.replay(stream),
        lambda: inner.capture(npu.stream(Role.AUX), lambda: None),
    ):
        with pytest.raises(Unsupported):
            graph.capture(stream, program)


def test_a_replay_on_a_failed_stream_says_so(
    npu: AscendAccelerator, stream: DeviceStream, number: Tensor
) -> None:
    graph = npu.graph()
    graph.capture(stream, lambda: stream.launch(partial(append, number, 1)))
    stream.launch(lambda: 1 / 0)
    with pytest.raises(StreamFailed):
        graph.replay(stream)
    graph.replay(npu.stream(Role.AUX))
    npu.stream(Role.AUX).synchronize(SOON)
    assert int(number) == 1


def test_the_deepest_task_queue_has_no_graphs(
    npu: AscendAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    with pytest.raises(Unsupported, match="TASK_QUEUE_ENABLE=2"):
        npu.graph()


def test_in_an_engines_capture_launches_work_and_what_needs_the_replays_is_refused(
    npu: AscendAccelerator, number: Tensor
) -> None:
    theirs, graph = native.npu().Stream(), native.npu().NPUGraph()
    adopted, lock = npu.adopt(theirs), npu.stream_lock(SOON)
    store = npu.slot_store(SlotLayout(((Segment("w", number),),), 1))
    with native.current(theirs):
        graph.capture_begin(capture_error_mode="thread_local")
        adopted.launch(partial(append, number, 1))
        with pytest.raises(Unsupported, match="not ours"):
            lock.acquire(adopted)
        assert lock._lent == set()
        with pytest.raises(Unsupported, match="not ours"):
            store.commit([(0, 0)], adopted)
        graph.capture_end()
        for _ in range(2):
            graph.replay()
    adopted.synchronize(SOON)
    assert int(number) == 11
