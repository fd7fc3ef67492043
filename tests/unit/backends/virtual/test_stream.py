"""Streams and events on a schedule."""

from collections.abc import Callable
from functools import partial

import pytest
from helpers.strategies.virtual_worlds import Worlds

from equipoise.backends.virtual.accelerator import VirtualAccelerator
from equipoise.backends.virtual.profiles import (
    ALIASING_POOL,
    LAGGING_QUERY,
    ONE_SIGNAL_ONE_WAITER,
)
from equipoise.hal.errors import StreamFailed, StreamTimeout, Unsupported
from equipoise.hal.stream import Role

SECONDS = 1.0


@pytest.fixture
def device(make_world: Worlds) -> VirtualAccelerator:
    return make_world().accelerator(0)


def test_launch_runs_only_when_world_advances(make_world: Worlds) -> None:
    world = make_world()
    log: list[str] = []
    world.accelerator(0).stream(Role.COMPUTE).launch(lambda: log.append("ran"))
    assert (log, world.movable()) == ([], 1)
    world.advance(0)
    assert (log, world.movable()) == (["ran"], 0)


@pytest.mark.parametrize(
    ("schedule", "order"), [(b"\0", ["compute", "copy"]), (b"\1", ["copy", "compute"])]
)
def test_schedule_chooses_next_stream(
    make_world: Worlds, schedule: bytes, order: list[str]
) -> None:
    device, run_order = make_world(1, schedule).accelerator(0), list[str]()
    for role in (Role.COMPUTE, Role.COPY):
        device.stream(role).launch(partial(run_order.append, str(role)))
    device.synchronize(SECONDS)
    assert run_order == order


def test_synchronize_with_zero_timeout_moves_nothing(device: VirtualAccelerator) -> None:
    stream = device.stream(Role.COMPUTE)
    stream.launch(lambda: None)
    with pytest.raises(StreamTimeout):
        stream.synchronize(0.0)
    stream.synchronize(SECONDS)
    stream.synchronize(0.0)


def test_hold_stops_only_later_launches(device: VirtualAccelerator) -> None:
    stream, log = device.stream(Role.COMPUTE), []
    stream.launch(lambda: log.append("before"))
    stream.hold()
    stream.launch(lambda: log.append("behind"))
    with pytest.raises(StreamTimeout):
        stream.synchronize(SECONDS)
    assert log == ["before"]
    stream.let_go()
    stream.synchronize(SECONDS)
    assert log == ["before", "behind"]


def test_stream_failure_is_raised_by_every_later_call(
    device: VirtualAccelerator,
) -> None:
    stream, other, event = device.stream(Role.COMPUTE), device.stream(Role.COPY), device.event()
    log: list[str] = []

    def fall() -> None:
        raise ZeroDivisionError("on purpose")

    stream.launch(fall)
    stream.launch(lambda: log.append("never"))
    stream.record(event)
    other.wait(event)
    calls: tuple[Callable[[], None], ...] = (
        partial(stream.synchronize, SECONDS),
        partial(stream.launch, fall),
        partial(event.synchronize, SECONDS),
        partial(other.synchronize, SECONDS),
    )
    for call in calls:
        with pytest.raises(StreamFailed, match="on purpose") as error:
            call()
        assert isinstance(error.value.__cause__, StreamFailed | ZeroDivisionError)
    assert event.query()
    assert log == []


def test_nested_launch_runs_in_place(device: VirtualAccelerator) -> None:
    stream, event = device.stream(Role.COMPUTE), device.event()
    log: list[str | bool] = []

    def outer() -> None:
        stream.launch(lambda: log.append("inner"))
        stream.record(event)
        log.append(event.query())

    stream.launch(outer)
    stream.launch(lambda: log.append("next"))
    stream.synchronize(SECONDS)
    assert log == ["inner", True, "next"]


def test_program_waiting_for_later_work_fails_its_stream(device: VirtualAccelerator) -> None:
    stream, other, event = device.stream(Role.COMPUTE), device.stream(Role.COPY), device.event()
    other.hold()
    other.record(event)
    stream.launch(lambda: stream.wait(event))
    with pytest.raises(StreamFailed, match="never come"):
        stream.synchronize(SECONDS)


def test_current_stream_is_per_host(make_world: Worlds) -> None:
    world = make_world()
    first, second = (world.accelerator(0).stream(role) for role in (Role.COMPUTE, Role.COPY))
    world.step_in(0, 0)
    with first.current():
        world.step_in(0, 1)
        assert world.device(0).issuing() is None
        with second.current():
            assert world.device(0).issuing() is second
        world.step_in(0, 0)
        assert world.device(0).issuing() is first
    assert world.device(0).issuing() is None


def test_running_program_has_its_stream_current(make_world: Worlds) -> None:
    world, streams = make_world(), []
    stream = world.accelerator(0).stream(Role.COPY)
    stream.launch(lambda: streams.append(world.device(0).issuing()))
    stream.synchronize(SECONDS)
    assert streams == [stream]


def test_closed_device_refuses_launch(device: VirtualAccelerator) -> None:
    stream, log = device.stream(Role.COMPUTE), []
    stream.launch(lambda: log.append("ran"))
    device.close()
    device.close()
    assert log == ["ran"]
    with pytest.raises(StreamFailed, match="closed"):
        stream.launch(lambda: None)


def test_close_does_not_wait_for_held_stream(device: VirtualAccelerator) -> None:
    stream, event = device.stream(Role.COMPUTE), device.event()
    stream.hold()
    stream.record(event)
    device.close()
    with pytest.raises(StreamFailed):
        event.synchronize(SECONDS)


def test_lagging_query_is_true_one_micro_step_later(make_world: Worlds) -> None:
    world = make_world(backend=LAGGING_QUERY)
    stream, event = world.accelerator(0).stream(Role.COMPUTE), world.accelerator(0).event()
    stream.record(event)
    world.advance(world.movable() - 1)
    assert (event.query(), world.movable()) == (False, 1)
    world.advance(0)
    assert event.query()


def test_lagging_query_is_true_after_synchronize(
    make_world: Worlds,
) -> None:
    device = make_world(backend=LAGGING_QUERY).accelerator(0)
    stream, event = device.stream(Role.COMPUTE), device.event()
    stream.record(event)
    stream.synchronize(SECONDS)
    assert event.query()
    stream.record(event)
    event.synchronize(SECONDS)
    assert event.query()


def test_one_shot_event_signals_every_waiter(make_world: Worlds) -> None:
    device = make_world(backend=ONE_SIGNAL_ONE_WAITER).accelerator(0)
    stream, event, roles = device.stream(Role.COMPUTE), device.event(), list[Role]()
    stream.record(event)
    for role in (Role.COPY, Role.COMM):
        device.stream(role).wait(event)
        device.stream(role).launch(partial(roles.append, role))
    device.synchronize(SECONDS)
    device.stream(Role.AUX).wait(event)
    device.stream(Role.AUX).launch(partial(roles.append, Role.AUX))
    device.synchronize(SECONDS)
    assert roles == [Role.COPY, Role.COMM, Role.AUX]


def test_aliasing_pool_roles_share_one_queue(make_world: Worlds) -> None:
    world = make_world(backend=ALIASING_POOL)
    device, roles = world.accelerator(0), list[Role]()
    for role in Role:
        device.stream(role).launch(partial(roles.append, role))
    assert world.movable() == 1
    device.synchronize(SECONDS)
    assert roles == list(Role)
    with pytest.raises(Unsupported):
        device.stream_lock(SECONDS)


def test_aliasing_pool_role_fails_alone(make_world: Worlds) -> None:
    device, log = make_world(backend=ALIASING_POOL).accelerator(0), []
    device.stream(Role.COPY).launch(lambda: 1 // 0)
    device.stream(Role.COMPUTE).launch(lambda: log.append("ran"))
    device.stream(Role.COMPUTE).synchronize(SECONDS)
    assert log == ["ran"]
    with pytest.raises(StreamFailed):
        device.stream(Role.COPY).synchronize(SECONDS)


def test_stream_refuses_foreign_event(device: VirtualAccelerator) -> None:
    with pytest.raises(TypeError):
        device.stream(Role.COMPUTE).record(object())  # type: ignore[arg-type]
