"""Streams and events of devices: clauses O1 to O4, E5, E7, B4, B5, C8."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from helpers.harnesses.devices import backend, current_stream, fresh_stream, handle
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.backends.cpu import BACKEND as CPU
from equipoise.backends.devices.accelerator import DeviceAccelerator
from equipoise.backends.devices.stream import DeviceStream
from equipoise.hal.errors import StreamFailed, StreamTimeout, Unsupported
from equipoise.hal.stream import Role

BRIEF = 0.05


@pytest.fixture
def stream(device: DeviceAccelerator) -> DeviceStream:
    return device.stream(Role.COMPUTE)


def cell(device: DeviceAccelerator) -> Tensor:
    """int64 [1], zero on the device."""
    tensor = torch.zeros(1, dtype=torch.int64, device=device.device)
    current_stream(device).synchronize()
    return tensor


def append(number: Tensor, digit: int) -> None:
    """One more digit, to be launched: tells who ran, and when."""
    number.mul_(10).add_(digit)


def fail() -> None:
    raise ZeroDivisionError("on purpose")


def test_stream_runs_launches_in_order_after_wait(
    device: DeviceAccelerator, stream: DeviceStream
) -> None:
    other, number, event = device.stream(Role.COPY), cell(device), device.event()
    for digit in (1, 2):
        stream.launch(partial(append, number, digit))
    stream.record(event)
    other.wait(event)
    other.launch(partial(append, number, 3))
    other.synchronize(WATCHDOG)
    assert int(number) == 123


def test_event_recorded_again_keeps_point_of_waiting_stream(
    device: DeviceAccelerator, stream: DeviceStream
) -> None:
    """The second recording is behind a lock that nobody signals."""
    other, event, lock = device.stream(Role.COPY), device.event(), device.stream_lock(WATCHDOG)
    stream.record(event)
    other.wait(event)
    lock.acquire(stream)
    stream.record(event)
    other.synchronize(WATCHDOG)
    assert not event.query()
    with pytest.raises(StreamTimeout):
        event.synchronize(BRIEF)
    lock.signal(0)
    event.synchronize(WATCHDOG)


def test_event_recorded_again_keeps_point_of_waiting_host(
    device: DeviceAccelerator, stream: DeviceStream
) -> None:
    other, event = device.stream(Role.COPY), device.event()
    locks = {on: device.stream_lock(WATCHDOG) for on in (stream, other)}
    for on, lock in locks.items():
        lock.acquire(on)
    stream.record(event)
    point = event.latest()
    other.record(event)
    locks[stream].signal(0)
    point.wait(WATCHDOG, "the first point")
    assert not event.query()
    locks[other].signal(0)
    event.synchronize(WATCHDOG)


def test_synchronize_times_out_on_blocked_stream(
    device: DeviceAccelerator, stream: DeviceStream
) -> None:
    lock = device.stream_lock(WATCHDOG)
    lock.acquire(stream)
    with pytest.raises(StreamTimeout, match="compute"):
        stream.synchronize(BRIEF)
    with pytest.raises(StreamTimeout):
        device.synchronize(BRIEF)
    lock.signal(0)
    device.synchronize(WATCHDOG)


def test_failed_stream_is_drained_before_synchronize_raises(
    device: DeviceAccelerator, stream: DeviceStream
) -> None:
    lock = device.stream_lock(WATCHDOG)
    lock.acquire(stream)
    stream.launch(fail)
    with pytest.raises(StreamTimeout):
        stream.synchronize(BRIEF)
    lock.signal(0)
    with pytest.raises(StreamFailed):
        stream.synchronize(WATCHDOG)


def test_stream_waiting_for_event_of_failed_stream_fails(
    device: DeviceAccelerator, stream: DeviceStream
) -> None:
    event, other = device.event(), device.stream(Role.AUX)
    stream.launch(fail)
    with pytest.raises(StreamFailed):
        stream.record(event)
    with pytest.raises(StreamFailed, match="on purpose"):
        other.wait(event)
    with pytest.raises(StreamFailed, match="on purpose"):
        other.launch(lambda: None)


def test_second_accelerator_has_healthy_streams_after_failure(
    kind: str, device: DeviceAccelerator, stream: DeviceStream
) -> None:
    stream.launch(fail)
    second = backend(kind).open(0)
    assert isinstance(second, DeviceAccelerator)
    fresh = second.stream(Role.COMPUTE)
    assert fresh.wraps(stream.native_stream)
    fresh.launch(lambda: None)
    fresh.synchronize(WATCHDOG)
    second.close()


def test_nested_launch_runs_in_place_and_its_error_is_catchable(
    device: DeviceAccelerator, stream: DeviceStream
) -> None:
    number = cell(device)

    def program() -> None:
        append(number, 1)
        stream.launch(partial(append, number, 2))
        with pytest.raises(ZeroDivisionError):
            stream.launch(fail)
        append(number, 3)

    stream.launch(program)
    stream.synchronize(WATCHDOG)
    assert int(number) == 123


def test_launch_makes_its_stream_current(device: DeviceAccelerator, stream: DeviceStream) -> None:
    streams: list[Any] = []
    before = current_stream(device)
    stream.launch(lambda: streams.append(current_stream(device)))
    with device.stream(Role.AUX).current():
        streams.append(current_stream(device))
    assert streams == [stream.native_stream, device.stream(Role.AUX).native_stream]
    assert current_stream(device) == before


def test_threads_may_launch_on_one_stream(device: DeviceAccelerator, stream: DeviceStream) -> None:
    number, threads, launches = cell(device), 4, 8

    def work() -> None:
        for _ in range(launches):
            stream.launch(partial(number.add_, 1))

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(work) for _ in range(threads)]:
            future.result(WATCHDOG)
    stream.synchronize(WATCHDOG)
    assert int(number) == threads * launches


def test_event_can_be_queried_from_fresh_thread(
    device: DeviceAccelerator, stream: DeviceStream
) -> None:
    event = device.event()
    stream.record(event)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(event.synchronize, WATCHDOG).result(WATCHDOG)
        assert pool.submit(event.query).result(WATCHDOG)


def test_device_error_fails_stream_with_its_cause(
    device: DeviceAccelerator, stream: DeviceStream
) -> None:
    """The driver's stream cannot be used any more after a real one, so the vendor's is doubled."""

    class BrokenNative:
        device_index = 0

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            raise RuntimeError("error code is 507015")

    stream.synchronize(WATCHDOG)
    failing_stream = DeviceStream(
        Role.AUX, "broken", stream.device, stream.native_stream, device.stream(Role.AUX).issue_lock
    )
    failing_stream._native = _Half(stream.native_stream, BrokenNative())
    with pytest.raises(StreamFailed, match="507015"):
        failing_stream._ask_for_errors()
    with pytest.raises(StreamFailed, match="507015"):
        failing_stream.launch(lambda: None)


class _Half:
    """A vendor's stream of which two methods are somebody else's."""

    def __init__(self, real: Any, other: Any) -> None:
        self._real, self._other = real, other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other if hasattr(self._other, name) else self._real, name)


def test_adopt_returns_same_wrapper_for_engine_stream(device: DeviceAccelerator) -> None:
    theirs = fresh_stream(device)
    adopted = device.adopt(theirs)
    assert device.adopt(theirs) is adopted
    number, event = cell(device), device.event()
    adopted.launch(partial(append, number, 1))
    adopted.record(event)
    device.stream(Role.COPY).wait(event)
    device.stream(Role.COPY).synchronize(WATCHDOG)
    assert int(number) == 1
    ours = device.stream(Role.COMPUTE)
    assert device.adopt(ours.native_stream) is ours
    current = torch.accelerator.current_stream(device.device)  # the same stream by another class
    assert device.adopt(current) is device.adopt(current_stream(device))


def test_stream_refuses_foreign_event(device: DeviceAccelerator, stream: DeviceStream) -> None:
    with pytest.raises(TypeError, match="another backend"):
        stream.wait(CPU.open(0).event())


def test_streams_do_not_alias_after_many_opens(kind: str, device: DeviceAccelerator) -> None:
    """The vendor's pool begins again behind its 32nd stream."""
    for _ in range(40):
        backend(kind).open(0).close()
    streams = {handle(device.stream(role).native_stream) for role in Role}
    assert len(streams) == len(Role)


def test_launch_is_atomic_to_other_threads(device: DeviceAccelerator, stream: DeviceStream) -> None:
    """The second thread's launch comes while the first one's program is at its middle."""
    number, middle = cell(device), threading.Event()

    def program() -> None:
        append(number, 1)
        middle.set()
        append(number, 2)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(middle.wait, WATCHDOG)
        other = pool.submit(lambda: stream.launch(partial(append, number, 3)))
        stream.launch(program)
        other.result(WATCHDOG)
    stream.synchronize(WATCHDOG)
    assert int(number) == 123


def test_close_ends_blocked_stream_and_refuses_launch(kind: str, device: DeviceAccelerator) -> None:
    stream, lock = device.stream(Role.COMPUTE), device.stream_lock(WATCHDOG)
    lock.acquire(stream)
    before = threading.active_count()
    device.close()
    with pytest.raises(StreamFailed, match="closed"):
        stream.launch(lambda: None)
    assert threading.active_count() == before - 1  # the watchdog of the lock
    fresh = backend(kind).open(0)
    fresh.synchronize(WATCHDOG)  # the vendor's stream was let go
    fresh.close()


def test_adopt_refuses_foreign_streams(device: DeviceAccelerator) -> None:
    for foreign in (torch.Stream(device="cpu"), CPU.open(0).stream(Role.AUX), object()):
        with pytest.raises(Unsupported):
            device.adopt(foreign)
