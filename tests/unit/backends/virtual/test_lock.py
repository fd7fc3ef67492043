"""The stream lock and graphs on a schedule."""

import pytest
from helpers.strategies.worlds import Worlds
from hypothesis import given
from hypothesis import strategies as st

from equipoise.backends.virtual import BACKEND
from equipoise.backends.virtual.lock import VirtualStreamLock
from equipoise.backends.virtual.stream import VirtualStream
from equipoise.backends.virtual.world import World
from equipoise.hal.errors import (
    LockMisuse,
    LockPoisoned,
    StaleEpoch,
    StreamFailed,
    StreamTimeout,
    Unsupported,
)
from equipoise.hal.stream import Role

SECONDS = 1.0
Hand = tuple[World, VirtualStream, VirtualStreamLock]


@pytest.fixture
def hand(make_world: Worlds) -> Hand:
    world = make_world()
    device = world.accelerator(0)
    return world, device.stream(Role.COMPUTE), device.stream_lock(SECONDS)


@given(st.binary(max_size=48), st.integers(1, 4))
def test_reader_and_mover_take_turns_on_every_schedule(schedule: bytes, turns: int) -> None:
    world = BACKEND.world(1, schedule)
    device, cell, seen = world.accelerator(0), [0], []
    stream, lock = device.stream(Role.COMPUTE), device.stream_lock(SECONDS)
    for _ in range(turns):
        lock.acquire(stream)
        stream.launch(lambda: seen.append(cell[0]))
        lock.release(stream)
    for turn in range(turns):
        cell[0] = turn
        lock.signal(0)
        lock.wait(0, SECONDS)
    assert seen == list(range(turns))
    world.close()


def test_a_waiting_acquire_does_not_move(hand: Hand) -> None:
    world, stream, lock = hand
    lock.acquire(stream)
    assert world.movable() == 0
    lock.signal(0)
    assert world.movable() == 1


def test_a_mover_out_of_turn_is_told(hand: Hand) -> None:
    _, stream, lock = hand
    with pytest.raises(LockMisuse):
        lock.wait(0, SECONDS)
    lock.signal(0)
    with pytest.raises(LockMisuse):
        lock.signal(0)
    lock.acquire(stream)
    stream.synchronize(SECONDS)
    with pytest.raises(LockMisuse):
        lock.signal(0)


def test_waiting_again_is_allowed(hand: Hand) -> None:
    _, stream, lock = hand
    lock.signal(0)
    with pytest.raises(StreamTimeout):
        lock.wait(0, SECONDS)
    lock.acquire(stream)
    lock.release(stream)
    lock.wait(0, SECONDS)


def test_time_poisons_the_lock_of_the_acquire_that_waits(hand: Hand) -> None:
    world, stream, lock = hand
    assert not world.expire()
    lock.acquire(stream)
    assert world.expire()
    stream.synchronize(SECONDS)
    for call in (lock.check, lambda: lock.signal(0), lambda: lock.wait(0, SECONDS)):
        with pytest.raises(LockPoisoned):
            call()
    assert lock.drain(SECONDS) == 1
    lock.check()


def test_an_acquire_that_has_not_come_to_its_turn_does_not_wait_yet(hand: Hand) -> None:
    world, stream, lock = hand
    stream.hold()
    lock.acquire(stream)
    assert not world.expire()
    lock.check()


def test_a_late_signal_does_not_reach_the_next_epoch(hand: Hand) -> None:
    world, stream, lock = hand
    assert lock.drain(SECONDS) == 1
    lock.acquire(stream)
    with pytest.raises(StaleEpoch):
        lock.signal(0)
    assert world.movable() == 0


def test_an_epoch_with_something_on_its_way_goes_on(hand: Hand) -> None:
    _, stream, lock = hand
    lock.acquire(stream)
    with pytest.raises(StreamTimeout):
        lock.drain(SECONDS)
    assert lock.epoch == 0


def test_a_failed_stream_has_nothing_on_its_way(hand: Hand) -> None:
    _, stream, lock = hand
    stream.launch(lambda: 1 // 0)
    lock.acquire(stream)
    assert lock.drain(SECONDS) == 1
    with pytest.raises(StreamFailed):
        lock.acquire(stream)
    assert lock.drain(SECONDS) == 2


def test_a_captured_hand_over_happens_at_every_replay(hand: Hand) -> None:
    world, stream, lock = hand
    graph, seen, cell = world.accelerator(0).graph(), [], [0]

    def program() -> None:
        lock.acquire(stream)
        stream.launch(lambda: seen.append(cell[0]))
        lock.release(stream)

    graph.capture(stream, program)
    assert (world.movable(), lock.drain(SECONDS)) == (0, 1)
    for turn in range(3):
        graph.replay(stream)
        cell[0] = turn
        lock.signal(1)
        lock.wait(1, SECONDS)
    assert seen == [0, 1, 2]


def test_a_capture_that_raises_leaves_the_graph_as_it_was(hand: Hand) -> None:
    world, stream, _ = hand
    graph, seen = world.accelerator(0).graph(), []
    graph.capture(stream, lambda: stream.launch(lambda: seen.append("kept")))

    def fall() -> None:
        stream.launch(lambda: seen.append("lost"))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        graph.capture(stream, fall)
    graph.replay(stream)
    stream.synchronize(SECONDS)
    assert seen == ["kept"]


def test_a_captured_event_is_recorded_at_the_replay(hand: Hand) -> None:
    world, stream, _ = hand
    device = world.accelerator(0)
    graph, event = device.graph(), device.event()

    def program() -> None:
        stream.record(event)
        stream.wait(event)

    graph.capture(stream, program)
    assert not event.query()
    graph.replay(stream)
    stream.synchronize(SECONDS)
    assert event.query()


def test_the_host_cannot_wait_for_a_stream_that_is_captured(hand: Hand) -> None:
    world, stream, _ = hand
    graph = world.accelerator(0).graph()
    with pytest.raises(Unsupported):
        graph.capture(stream, lambda: stream.synchronize(SECONDS))
    with pytest.raises(Unsupported):
        graph.capture(stream, lambda: graph.capture(stream, lambda: None))
