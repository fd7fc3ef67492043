"""The stream lock of the CPU: clauses O5, L3."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.watchdog import WATCHDOG

from equipoise.backends.cpu import BACKEND
from equipoise.backends.cpu.accelerator import CpuAccelerator
from equipoise.backends.cpu.lock import CpuStreamLock
from equipoise.hal.errors import (
    LockPoisoned,
    StaleEpoch,
    StreamError,
    StreamFailed,
    StreamTimeout,
)
from equipoise.hal.stream import Role


@pytest.fixture
def cpu() -> Iterator[CpuAccelerator]:
    accelerator = BACKEND.open(0)
    yield accelerator
    accelerator.close()


@pytest.fixture
def lock(cpu: CpuAccelerator) -> CpuStreamLock:
    return cpu.stream_lock(WATCHDOG)


def test_release_without_acquire_hands_nothing_over(
    cpu: CpuAccelerator, lock: CpuStreamLock
) -> None:
    stream = cpu.stream(Role.COMPUTE)
    lock.release(stream)
    stream.synchronize(WATCHDOG)
    lock.signal(0)
    with pytest.raises(StreamTimeout):
        lock.wait(0, 0.02)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (CpuStreamLock.poison, LockPoisoned),
        (lambda lock: lock.drain(WATCHDOG), StaleEpoch),
    ],
    ids=["poison", "drain"],
)
def test_poison_and_drain_wake_waiting_writer(
    lock: CpuStreamLock, end: Callable[[CpuStreamLock], object], error: type[StreamError]
) -> None:
    lock.signal(0)
    with ThreadPoolExecutor(1) as pool:
        wait_future = pool.submit(lock.wait, 0, WATCHDOG)
        end(lock)
        with pytest.raises(error):
            wait_future.result(WATCHDOG)


def test_drain_ignores_failed_stream(cpu: CpuAccelerator, lock: CpuStreamLock) -> None:
    stream, gate = cpu.stream(Role.COMPUTE), threading.Event()
    stream.launch(lambda: gate.wait(WATCHDOG))
    stream.launch(lambda: 1 / 0)
    lock.acquire(stream)
    gate.set()
    assert lock.drain(WATCHDOG) == 1
    with pytest.raises(StreamFailed):
        lock.acquire(stream)
    assert lock.drain(WATCHDOG) == 2


def test_lock_memory_is_bounded_without_drain(cpu: CpuAccelerator, lock: CpuStreamLock) -> None:
    stream = cpu.stream(Role.COMPUTE)
    for _ in range(200):
        lock.acquire(stream)
        lock.release(stream)
        lock.signal(0)
        lock.wait(0, WATCHDOG)
    stream.synchronize(WATCHDOG)
    lock.release(stream)
    assert len(lock._pending_events) == 1


def test_program_may_acquire_lock(cpu: CpuAccelerator, lock: CpuStreamLock) -> None:
    stream, values = cpu.stream(Role.COMPUTE), []

    def step() -> None:
        lock.acquire(stream)
        values.append(1)
        lock.release(stream)

    stream.launch(step)
    lock.signal(0)
    lock.wait(0, WATCHDOG)
    assert values == [1]
