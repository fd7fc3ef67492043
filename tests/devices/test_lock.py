"""The stream lock of devices: clauses O5, O6, L1 to L3, L5 to L7."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from helpers.harnesses.devices import current_stream, device_of
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.backends.devices.accelerator import DeviceAccelerator
from equipoise.backends.devices.lock import DeviceStreamLock, LockWatchdog
from equipoise.hal.errors import (
    LockMisuse,
    LockPoisoned,
    StaleEpoch,
    StreamError,
    StreamFailed,
    StreamTimeout,
)
from equipoise.hal.stream import Event, Role, Stream

BRIEF = 0.05


@pytest.fixture
def lock(device: DeviceAccelerator) -> DeviceStreamLock:
    return device.stream_lock(WATCHDOG)


@pytest.fixture
def stream(device: DeviceAccelerator) -> Stream:
    return device.stream(Role.COMPUTE)


def zeros(device: DeviceAccelerator, count: int) -> Tensor:
    tensor = torch.zeros(count, dtype=torch.int32, device=device.device)
    current_stream(device).synchronize()
    return tensor


def record_event(device: DeviceAccelerator, stream: Stream) -> Event:
    event = device.event()
    stream.record(event)
    return event


def test_signal_releases_only_first_acquire(
    device: DeviceAccelerator, lock: DeviceStreamLock
) -> None:
    events = []
    for role in (Role.COMPUTE, Role.AUX):
        lock.acquire(device.stream(role))
        events.append(record_event(device, device.stream(role)))
        lock.release(device.stream(role))
    lock.signal(0)
    lock.wait(0, WATCHDOG)
    assert [event.query() for event in events] == [True, False]
    with pytest.raises(StreamTimeout):
        lock.drain(BRIEF)
    lock.signal(0)
    lock.wait(0, WATCHDOG)
    events[1].synchronize(WATCHDOG)


def test_graph_may_wait_for_lock_on_two_streams(
    device: DeviceAccelerator, lock: DeviceStreamLock, stream: Stream
) -> None:
    """Both replays wait for the same word: one signal must not free both."""
    graph, events = device.graph(), []
    graph.capture(stream, lambda: (lock.acquire(stream), lock.release(stream)))
    for role in (Role.COMPUTE, Role.AUX):
        graph.replay(device.stream(role))
        events.append(record_event(device, device.stream(role)))
    lock.signal(0)
    lock.wait(0, WATCHDOG)
    with pytest.raises(StreamTimeout):
        lock.drain(BRIEF)
    assert sum(event.query() for event in events) == 1
    lock.signal(0)
    lock.wait(0, WATCHDOG)
    device.synchronize(WATCHDOG)


def test_writer_wait_times_out_while_stream_reads(
    device: DeviceAccelerator, lock: DeviceStreamLock, stream: Stream
) -> None:
    """What keeps the reader reading is another lock."""
    busy = device.stream_lock(WATCHDOG)
    lock.acquire(stream)
    busy.acquire(stream)
    lock.release(stream)
    lock.signal(0)
    with pytest.raises(StreamTimeout, match="may read the slots"):
        lock.wait(0, BRIEF)
    busy.signal(0)
    lock.wait(0, WATCHDOG)


def test_lock_call_out_of_turn_raises_misuse(lock: DeviceStreamLock, stream: Stream) -> None:
    with pytest.raises(LockMisuse, match="that it owns"):
        lock.wait(0, WATCHDOG)
    lock.signal(0)
    with pytest.raises(LockMisuse, match="out of turn"):
        lock.signal(0)
    lock.acquire(stream)
    lock.release(stream)
    lock.wait(0, WATCHDOG)
    lock.signal(0)


def test_release_without_acquire_hands_nothing_over(lock: DeviceStreamLock, stream: Stream) -> None:
    lock.release(stream)
    stream.synchronize(WATCHDOG)
    lock.signal(0)
    with pytest.raises(StreamTimeout):
        lock.wait(0, BRIEF)


def test_captured_release_without_acquire_refuses_replay(
    device: DeviceAccelerator, lock: DeviceStreamLock, stream: Stream
) -> None:
    graph = device.graph()
    graph.capture(stream, partial(lock.release, stream))
    with pytest.raises(LockMisuse, match="no acquire"):
        graph.replay(stream)
    lock.acquire(stream)
    graph.replay(stream)
    lock.signal(0)
    lock.wait(0, WATCHDOG)


def test_signal_of_old_epoch_is_refused(lock: DeviceStreamLock, stream: Stream) -> None:
    assert lock.drain(WATCHDOG) == lock.epoch == 1
    lock.acquire(stream)
    with pytest.raises(StaleEpoch, match="epoch 0 in epoch 1"):
        lock.signal(0)
    with pytest.raises(StaleEpoch):
        lock.wait(0, WATCHDOG)
    with pytest.raises(StreamTimeout):
        stream.synchronize(BRIEF)
    lock.signal(1)
    stream.synchronize(WATCHDOG)


def test_drain_clears_both_flags(lock: DeviceStreamLock, stream: Stream) -> None:
    lock.signal(0)
    assert lock.drain(WATCHDOG) == 1
    lock.acquire(stream)
    with pytest.raises(StreamTimeout):
        stream.synchronize(BRIEF)
    lock.signal(1)
    lock.release(stream)
    stream.synchronize(WATCHDOG)
    assert lock.drain(WATCHDOG) == 2
    with pytest.raises(LockMisuse):
        lock.wait(2, WATCHDOG)


def test_acquire_deadline_starts_when_stream_reaches_it(
    device: DeviceAccelerator, stream: Stream
) -> None:
    """It stands behind another lock for much longer than its deadline."""
    ahead, lock = device.stream_lock(WATCHDOG), device.stream_lock(BRIEF)
    ahead.acquire(stream)
    lock.acquire(stream)
    with pytest.raises(StreamTimeout):
        stream.synchronize(4 * BRIEF)
    lock.check()
    ahead.signal(0)
    stream.synchronize(WATCHDOG)
    with pytest.raises(LockPoisoned):
        lock.check()


def test_poisoned_lock_lets_streams_and_replays_pass_until_drain(
    device: DeviceAccelerator, lock: DeviceStreamLock, stream: Stream
) -> None:
    graph = device.graph()
    graph.capture(stream, lambda: (lock.acquire(stream), lock.release(stream)))
    for _ in range(3):
        graph.replay(stream)
    lock.poison()
    for _ in range(3):
        lock.release(stream)
        lock.acquire(stream)
        graph.replay(stream)
    stream.synchronize(WATCHDOG)
    calls: tuple[Callable[[], None], ...] = (
        lock.check,
        lambda: lock.signal(0),
        lambda: lock.wait(0, WATCHDOG),
    )
    for call in calls:
        with pytest.raises(LockPoisoned):
            call()
    assert lock.drain(WATCHDOG) == 1
    lock.check()
    graph.replay(stream)
    with pytest.raises(StreamTimeout):
        stream.synchronize(BRIEF)
    lock.signal(1)
    lock.wait(1, WATCHDOG)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (DeviceStreamLock.poison, LockPoisoned),
        (lambda lock: lock.drain(WATCHDOG), StaleEpoch),
    ],
    ids=["poison", "drain"],
)
def test_poison_and_drain_wake_waiting_writer(
    lock: DeviceStreamLock, end: Callable[[DeviceStreamLock], object], error: type[StreamError]
) -> None:
    lock.signal(0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lock.wait, 0, WATCHDOG)
        end(lock)
        with pytest.raises(error):
            waiting.result(WATCHDOG)


def test_drain_ignores_failed_stream(
    device: DeviceAccelerator, lock: DeviceStreamLock, stream: Stream
) -> None:
    lock.acquire(stream)
    stream.launch(lambda: 1 / 0)
    with pytest.raises(StreamFailed):
        lock.release(stream)
    lock.signal(0)
    assert lock.drain(WATCHDOG) == 1
    with pytest.raises(StreamFailed):
        lock.acquire(stream)
    assert lock.drain(WATCHDOG) == 2


def test_lock_memory_is_bounded_without_drain(lock: DeviceStreamLock, stream: Stream) -> None:
    for _ in range(50):
        lock.acquire(stream)
        lock.release(stream)
        lock.signal(0)
        lock.wait(0, WATCHDOG)
    stream.synchronize(WATCHDOG)
    lock.acquire(stream)
    lock.tick(0.0)
    assert len(lock._acquires) == 1
    assert len(lock._free_flags) + len(lock._borrowed_flags) <= 3
    lock.signal(0)


def test_program_may_acquire_lock(lock: DeviceStreamLock, stream: Stream) -> None:
    stream.launch(lambda: (lock.acquire(stream), lock.release(stream)))
    lock.signal(0)
    lock.wait(0, WATCHDOG)
    assert lock.drain(WATCHDOG) == 1


def test_watchdog_failure_poisons_lock(
    device: DeviceAccelerator,
    lock: DeviceStreamLock,
    stream: Stream,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: float) -> bool:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(lock, "tick", fail)
    lock.acquire(stream)
    device._lock_watchdog.check_all()
    with pytest.raises(LockPoisoned) as error:
        lock.check()
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    monkeypatch.undo()
    lock.poison()
    assert lock.drain(WATCHDOG) == 1


def test_watch_thread_starts_on_add_and_ends_on_stop(device: DeviceAccelerator) -> None:
    watch, before = LockWatchdog(device_of(device)), set(threading.enumerate())

    class Patient:
        ticks = 0

        def tick(self, now: float) -> bool:
            self.ticks += 1
            return self.ticks < 3

        def on_watchdog_failure(self, failure: BaseException) -> None:
            raise AssertionError from failure

    patient = Patient()
    assert set(threading.enumerate()) == before
    watch.add(patient)
    for _ in range(10000):
        if patient.ticks == 3:
            break
        threading.Event().wait(0.001)
    watch.stop()
    assert set(threading.enumerate()) == before
    assert patient.ticks == 3
    assert not watch._watched
