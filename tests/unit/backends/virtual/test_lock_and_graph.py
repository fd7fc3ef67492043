"""The stream lock and graphs on a schedule."""

import pytest
from helpers.strategies.virtual_worlds import Worlds

from equipoise.backends.virtual.lock import VirtualStreamLock
from equipoise.backends.virtual.stream import VirtualStream
from equipoise.backends.virtual.world import VirtualWorld
from equipoise.hal.errors import (
    StreamFailed,
    Unsupported,
)
from equipoise.hal.stream import Role

SECONDS = 1.0
Hand = tuple[VirtualWorld, VirtualStream, VirtualStreamLock]


@pytest.fixture
def hand(make_world: Worlds) -> Hand:
    world = make_world()
    device = world.accelerator(0)
    return world, device.stream(Role.COMPUTE), device.stream_lock(SECONDS)


def test_waiting_acquire_is_not_movable(hand: Hand) -> None:
    world, stream, lock = hand
    lock.acquire(stream)
    assert world.movable() == 0
    lock.signal(0)
    assert world.movable() == 1


def test_acquire_on_held_stream_does_not_expire(hand: Hand) -> None:
    world, stream, lock = hand
    stream.hold()
    lock.acquire(stream)
    assert not world.expire()
    lock.check()


def test_drain_ignores_failed_stream(hand: Hand) -> None:
    _, stream, lock = hand
    stream.launch(lambda: 1 // 0)
    lock.acquire(stream)
    assert lock.drain(SECONDS) == 1
    with pytest.raises(StreamFailed):
        lock.acquire(stream)
    assert lock.drain(SECONDS) == 2


def test_failed_capture_leaves_graph_unchanged(hand: Hand) -> None:
    world, stream, _ = hand
    graph, log = world.accelerator(0).graph(), []
    graph.capture(stream, lambda: stream.launch(lambda: log.append("kept")))

    def fall() -> None:
        stream.launch(lambda: log.append("lost"))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        graph.capture(stream, fall)
    graph.replay(stream)
    stream.synchronize(SECONDS)
    assert log == ["kept"]


def test_captured_event_is_recorded_at_replay(hand: Hand) -> None:
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


def test_captured_stream_refuses_synchronize_and_second_capture(hand: Hand) -> None:
    world, stream, _ = hand
    graph = world.accelerator(0).graph()
    with pytest.raises(Unsupported):
        graph.capture(stream, lambda: stream.synchronize(SECONDS))
    with pytest.raises(Unsupported):
        graph.capture(stream, lambda: graph.capture(stream, lambda: None))
