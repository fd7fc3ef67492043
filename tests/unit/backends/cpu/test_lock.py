"""The stream lock of the CPU: clauses O5, O6, L1 to L3, L6, L7."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.backends.cpu import BACKEND
from equipoise.backends.cpu.accelerator import CpuAccelerator
from equipoise.backends.cpu.lock import CpuStreamLock
from equipoise.hal.errors import (
    LockMisuse,
    LockPoisoned,
    StaleEpoch,
    StreamError,
    StreamFailed,
    StreamTimeout,
)
from equipoise.hal.stream import Role

SOON = 20.0


@pytest.fixture
def cpu() -> Iterator[CpuAccelerator]:
    made = BACKEND.open(0)
    yield made
    made.close()


@pytest.fixture
def lock(cpu: CpuAccelerator) -> CpuStreamLock:
    return cpu.stream_lock(SOON)


@settings(max_examples=25)
@given(st.integers(1, 12), st.booleans())
def test_mover_and_stream_take_strict_turns_and_every_round_is_seen_whole(
    rounds: int, captured: bool
) -> None:
    """The stream's part is launched ahead, or captured once and replayed."""
    cpu = BACKEND.open(0)
    lock, stream, slot, seen = cpu.stream_lock(SOON), cpu.stream(Role.COMPUTE), [0] * 8, []

    def step() -> None:
        lock.acquire(stream)
        stream.launch(lambda: seen.append(list(slot)))
        lock.release(stream)

    graph = cpu.graph()
    graph.capture(stream, step)
    for _ in range(rounds):
        (lambda: graph.replay(stream))() if captured else step()
    for number in range(1, rounds + 1):
        for place in range(len(slot)):
            slot[place] = number
        lock.signal(0)
        lock.wait(0, SOON)
    stream.synchronize(SOON)
    assert seen == [[number] * len(slot) for number in range(1, rounds + 1)]
    assert lock.drain(SOON) == 1
    cpu.close()


def test_a_signal_may_come_before_its_acquire(cpu: CpuAccelerator, lock: CpuStreamLock) -> None:
    stream, seen = cpu.stream(Role.COMPUTE), []
    lock.signal(0)
    lock.acquire(stream)
    stream.launch(lambda: seen.append(1))
    stream.synchronize(SOON)
    lock.release(stream)
    lock.wait(0, SOON)
    assert seen == [1]


def test_one_signal_releases_exactly_one_acquire(cpu: CpuAccelerator, lock: CpuStreamLock) -> None:
    streams = [cpu.stream(Role.COMPUTE), cpu.stream(Role.AUX)]
    seen: list[Role] = []
    for stream in streams:
        lock.acquire(stream)
        stream.launch(lambda role=stream.role: seen.append(role))  # type: ignore[misc]
        lock.release(stream)
    lock.signal(0)
    lock.wait(0, SOON)
    assert len(seen) == 1
    with pytest.raises(StreamTimeout):
        lock.drain(0.02)
    assert len(seen) == 1
    lock.signal(0)
    lock.wait(0, SOON)
    assert len(seen) == 2


def test_the_mover_does_not_write_while_the_stream_reads(
    cpu: CpuAccelerator, lock: CpuStreamLock
) -> None:
    stream, reading, gate = cpu.stream(Role.COMPUTE), threading.Event(), threading.Event()
    lock.acquire(stream)
    stream.launch(reading.set)
    stream.launch(lambda: gate.wait(SOON))
    lock.release(stream)
    lock.signal(0)
    assert reading.wait(SOON)
    with pytest.raises(StreamTimeout, match="the stream reads"):
        lock.wait(0, 0.02)
    gate.set()
    lock.wait(0, SOON)


def test_a_verb_out_of_turn_is_a_misuse_and_changes_nothing(
    cpu: CpuAccelerator, lock: CpuStreamLock
) -> None:
    stream = cpu.stream(Role.COMPUTE)
    with pytest.raises(LockMisuse, match="that it owns"):
        lock.wait(0, SOON)
    lock.signal(0)
    with pytest.raises(LockMisuse, match="out of turn"):
        lock.signal(0)
    lock.acquire(stream)
    lock.release(stream)
    lock.wait(0, SOON)
    lock.signal(0)


def test_a_release_without_an_acquire_hands_nothing_over(
    cpu: CpuAccelerator, lock: CpuStreamLock
) -> None:
    stream = cpu.stream(Role.COMPUTE)
    lock.release(stream)
    stream.synchronize(SOON)
    lock.signal(0)
    with pytest.raises(StreamTimeout):
        lock.wait(0, 0.02)


def test_a_late_signal_of_an_epoch_that_is_over_releases_nobody(
    cpu: CpuAccelerator, lock: CpuStreamLock
) -> None:
    stream, seen = cpu.stream(Role.COMPUTE), []
    assert lock.epoch == 0
    assert lock.drain(SOON) == lock.epoch == 1
    lock.acquire(stream)
    stream.launch(lambda: seen.append(1))
    with pytest.raises(StaleEpoch, match="epoch 0 in epoch 1"):
        lock.signal(0)
    with pytest.raises(StaleEpoch):
        lock.wait(0, SOON)
    with pytest.raises(StreamTimeout):
        stream.synchronize(0.02)
    assert seen == []
    lock.signal(1)
    stream.synchronize(SOON)


def test_draining_empties_both_words(cpu: CpuAccelerator, lock: CpuStreamLock) -> None:
    stream = cpu.stream(Role.COMPUTE)
    lock.signal(0)
    assert lock.drain(SOON) == 1
    lock.acquire(stream)
    with pytest.raises(StreamTimeout):
        stream.synchronize(0.02)
    lock.signal(1)
    lock.release(stream)
    stream.synchronize(SOON)
    assert lock.drain(SOON) == 2
    with pytest.raises(LockMisuse):
        lock.wait(2, SOON)


def test_draining_waits_for_what_is_on_its_way_and_may_give_up(
    cpu: CpuAccelerator, lock: CpuStreamLock
) -> None:
    stream = cpu.stream(Role.COMPUTE)
    lock.acquire(stream)
    with pytest.raises(StreamTimeout):
        lock.drain(0.02)
    assert lock.epoch == 0
    lock.signal(0)
    assert lock.drain(SOON) == 1


def test_a_stream_that_waits_for_longer_than_the_deadline_poisons_the_lock_and_goes_on(
    cpu: CpuAccelerator,
) -> None:
    lock, stream, seen = cpu.stream_lock(0.02), cpu.stream(Role.COMPUTE), []
    lock.check()
    lock.acquire(stream)
    stream.launch(lambda: seen.append(1))
    stream.synchronize(SOON)
    assert seen == [1]
    with pytest.raises(LockPoisoned, match="epoch 0"):
        lock.check()


def test_after_a_poison_everybody_passes_and_hosts_are_told_until_the_drain(
    cpu: CpuAccelerator, lock: CpuStreamLock
) -> None:
    stream = cpu.stream(Role.COMPUTE)
    lock.acquire(stream)
    lock.poison()
    for _ in range(3):
        lock.release(stream)
        lock.acquire(stream)
    stream.synchronize(SOON)
    calls: tuple[Callable[[], None], ...] = (
        lock.check,
        lambda: lock.signal(0),
        lambda: lock.wait(0, SOON),
    )
    for call in calls:
        with pytest.raises(LockPoisoned):
            call()
    assert lock.drain(SOON) == 1
    lock.check()
    lock.signal(1)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (CpuStreamLock.poison, LockPoisoned),
        (lambda lock: lock.drain(SOON), StaleEpoch),
    ],
    ids=["poison", "drain"],
)
def test_a_mover_that_waits_is_woken(
    lock: CpuStreamLock, end: Callable[[CpuStreamLock], object], error: type[StreamError]
) -> None:
    lock.signal(0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lock.wait, 0, SOON)
        end(lock)
        with pytest.raises(error):
            waiting.result(SOON)


def test_a_failed_stream_does_not_hold_up_the_drain(
    cpu: CpuAccelerator, lock: CpuStreamLock
) -> None:
    stream, gate = cpu.stream(Role.COMPUTE), threading.Event()
    stream.launch(lambda: gate.wait(SOON))
    stream.launch(lambda: 1 / 0)
    lock.acquire(stream)
    gate.set()
    assert lock.drain(SOON) == 1
    with pytest.raises(StreamFailed):
        lock.acquire(stream)
    assert lock.drain(SOON) == 2


def test_a_long_run_without_a_drain_keeps_no_memory(
    cpu: CpuAccelerator, lock: CpuStreamLock
) -> None:
    stream = cpu.stream(Role.COMPUTE)
    for _ in range(200):
        lock.acquire(stream)
        lock.release(stream)
        lock.signal(0)
        lock.wait(0, SOON)
    stream.synchronize(SOON)
    lock.release(stream)
    assert len(lock._passing) == 1


def test_a_program_may_take_the_lock_itself(cpu: CpuAccelerator, lock: CpuStreamLock) -> None:
    stream, seen = cpu.stream(Role.COMPUTE), []

    def step() -> None:
        lock.acquire(stream)
        seen.append(1)
        lock.release(stream)

    stream.launch(step)
    lock.signal(0)
    lock.wait(0, SOON)
    assert seen == [1]
