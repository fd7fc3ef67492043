"""Streams and events of the NPU: clauses O1 to O4, E5, E7, B4, B5, C8."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise.backends.ascend import BACKEND, native
from equipoise.backends.ascend.accelerator import AscendAccelerator
from equipoise.backends.cpu import BACKEND as CPU
from equipoise.backends.devices.stream import DeviceStream
from equipoise.hal.errors import EventNotRecorded, StreamFailed, StreamTimeout, Unsupported
from equipoise.hal.stream import Role

pytestmark = pytest.mark.npusim
SOON = 20.0
"""Seconds: far more than needed, far less than a test's time-out."""
BRIEF = 0.05


@pytest.fixture
def stream(npu: AscendAccelerator) -> DeviceStream:
    return npu.stream(Role.COMPUTE)


def cell(npu: AscendAccelerator) -> Tensor:
    """int64 [1], zero on the device."""
    made = torch.zeros(1, dtype=torch.int64, device=npu.device)
    native.npu().current_stream().synchronize()
    return made


def append(number: Tensor, digit: int) -> None:
    """One more digit, to be launched: tells who ran, and when."""
    number.mul_(10).add_(digit)


def fail() -> None:
    raise ZeroDivisionError("on purpose")


def test_what_is_launched_runs_in_order_behind_what_was_waited_for(
    npu: AscendAccelerator, stream: DeviceStream
) -> None:
    other, number, event = npu.stream(Role.COPY), cell(npu), npu.event()
    for digit in (1, 2):
        stream.launch(partial(append, number, digit))
    stream.record(event)
    other.wait(event)
    other.launch(partial(append, number, 3))
    other.synchronize(SOON)
    assert int(number) == 123


def test_recording_again_does_not_move_the_point_that_somebody_waits_for(
    npu: AscendAccelerator, stream: DeviceStream
) -> None:
    """The second recording is behind a lock that nobody signals."""
    other, event, lock = npu.stream(Role.COPY), npu.event(), npu.stream_lock(SOON)
    stream.record(event)
    other.wait(event)
    lock.acquire(stream)
    stream.record(event)
    other.synchronize(SOON)
    assert not event.query()
    with pytest.raises(StreamTimeout):
        event.synchronize(BRIEF)
    lock.signal(0)
    event.synchronize(SOON)


def test_a_host_that_waits_keeps_its_point_when_the_event_is_recorded_again(
    npu: AscendAccelerator, stream: DeviceStream
) -> None:
    other, event = npu.stream(Role.COPY), npu.event()
    locks = {on: npu.stream_lock(SOON) for on in (stream, other)}
    for on, lock in locks.items():
        lock.acquire(on)
    stream.record(event)
    point = event.latest()
    other.record(event)
    locks[stream].signal(0)
    point.wait(SOON, "the first point")
    assert not event.query()
    locks[other].signal(0)
    event.synchronize(SOON)


def test_an_event_that_was_never_recorded_is_waited_for_by_nobody(
    npu: AscendAccelerator, stream: DeviceStream
) -> None:
    event = npu.event()
    assert not event.query()
    with pytest.raises(EventNotRecorded):
        stream.wait(event)
    with pytest.raises(EventNotRecorded):
        event.synchronize(SOON)


def test_a_wait_that_cannot_end_is_given_up_at_its_time_out(
    npu: AscendAccelerator, stream: DeviceStream
) -> None:
    lock = npu.stream_lock(SOON)
    lock.acquire(stream)
    with pytest.raises(StreamTimeout, match="compute"):
        stream.synchronize(BRIEF)
    with pytest.raises(StreamTimeout):
        npu.synchronize(BRIEF)
    lock.signal(0)
    npu.synchronize(SOON)


def test_a_program_that_raises_fails_its_stream_with_the_first_cause(
    npu: AscendAccelerator, stream: DeviceStream
) -> None:
    number, before, behind = cell(npu), npu.event(), npu.event()
    stream.record(before)
    stream.launch(partial(append, number, 1))
    stream.launch(fail)
    for call in (
        lambda: stream.launch(partial(append, number, 2)),
        lambda: stream.record(behind),
        lambda: stream.wait(before),
        lambda: stream.synchronize(SOON),
        lambda: behind.synchronize(SOON),
        lambda: npu.synchronize(SOON),
    ):
        with pytest.raises(StreamFailed) as told:
            call()
        assert isinstance(told.value.__cause__, ZeroDivisionError)
    assert behind.query()
    assert int(number) == 1


def test_a_failed_stream_is_waited_for_before_it_says_so(
    npu: AscendAccelerator, stream: DeviceStream
) -> None:
    lock = npu.stream_lock(SOON)
    lock.acquire(stream)
    stream.launch(fail)
    with pytest.raises(StreamTimeout):
        stream.synchronize(BRIEF)
    lock.signal(0)
    with pytest.raises(StreamFailed):
        stream.synchronize(SOON)


def test_whoever_waits_for_an_event_of_a_failed_stream_fails_too(
    npu: AscendAccelerator, stream: DeviceStream
) -> None:
    event, other = npu.event(), npu.stream(Role.AUX)
    stream.launch(fail)
    with pytest.raises(StreamFailed):
        stream.record(event)
    with pytest.raises(StreamFailed, match="on purpose"):
        other.wait(event)
    with pytest.raises(StreamFailed, match="on purpose"):
        other.launch(lambda: None)


def test_another_accelerator_of_the_device_has_streams_that_have_not_failed(
    npu: AscendAccelerator, stream: DeviceStream
) -> None:
    stream.launch(fail)
    second = BACKEND.open(0)
    fresh = second.stream(Role.COMPUTE)
    assert fresh.wraps(stream.native)
    fresh.launch(lambda: None)
    fresh.synchronize(SOON)
    second.close()


def test_a_program_inside_a_program_runs_at_once_and_may_be_caught(
    npu: AscendAccelerator, stream: DeviceStream
) -> None:
    number = cell(npu)

    def program() -> None:
        append(number, 1)
        stream.launch(partial(append, number, 2))
        with pytest.raises(ZeroDivisionError):
            stream.launch(fail)
        append(number, 3)

    stream.launch(program)
    stream.synchronize(SOON)
    assert int(number) == 123


def test_the_stream_of_a_launch_is_the_vendors_current_one(
    npu: AscendAccelerator, stream: DeviceStream
) -> None:
    seen: list[Any] = []
    before = native.npu().current_stream()
    stream.launch(lambda: seen.append(native.npu().current_stream()))
    with npu.stream(Role.AUX).current():
        seen.append(native.npu().current_stream())
    assert seen == [stream.native, npu.stream(Role.AUX).native]
    assert native.npu().current_stream() == before


def test_threads_may_launch_on_one_stream(npu: AscendAccelerator, stream: DeviceStream) -> None:
    number, threads, launches = cell(npu), 4, 8

    def work() -> None:
        for _ in range(launches):
            stream.launch(partial(number.add_, 1))

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work) for _ in range(threads)]:
            done.result(SOON)
    stream.synchronize(SOON)
    assert int(number) == threads * launches


def test_an_event_may_be_asked_from_a_thread_that_never_saw_the_device(
    npu: AscendAccelerator, stream: DeviceStream
) -> None:
    event = npu.event()
    stream.record(event)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(event.synchronize, SOON).result(SOON)
        assert pool.submit(event.query).result(SOON)


def test_an_error_of_the_device_is_told_with_its_cause(
    npu: AscendAccelerator, stream: DeviceStream
) -> None:
    """The driver's stream cannot be used any more after a real one, so the vendor's is doubled."""

    class Broken:
        device_index = 0

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            raise RuntimeError("error code is 507015")

    stream.synchronize(SOON)
    broken = DeviceStream(
        Role.AUX, "broken", stream.device, stream.native, npu.stream(Role.AUX).gate
    )
    broken._native = _Half(stream.native, Broken())
    with pytest.raises(StreamFailed, match="507015"):
        broken._ask_for_errors()
    with pytest.raises(StreamFailed, match="507015"):
        broken.launch(lambda: None)


class _Half:
    """A vendor's stream of which two methods are somebody else's."""

    def __init__(self, real: Any, other: Any) -> None:
        self._real, self._other = real, other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other if hasattr(self._other, name) else self._real, name)


def test_streams_of_an_engine_are_adopted_once(npu: AscendAccelerator) -> None:
    theirs = native.npu().Stream()
    adopted = npu.adopt(theirs)
    assert npu.adopt(theirs) is adopted
    number, event = cell(npu), npu.event()
    adopted.launch(partial(append, number, 1))
    adopted.record(event)
    npu.stream(Role.COPY).wait(event)
    npu.stream(Role.COPY).synchronize(SOON)
    assert int(number) == 1
    ours = npu.stream(Role.COMPUTE)
    assert npu.adopt(ours.native) is ours
    current = torch.accelerator.current_stream(npu.device)  # the same stream by another class
    assert npu.adopt(current) is npu.adopt(native.npu().current_stream())


def test_what_torch_npu_cannot_handle_is_not_adopted(npu: AscendAccelerator) -> None:
    pointer = npu.stream(Role.COMPUTE).native.npu_stream
    external = native.npu().ExternalStream(pointer, device=0)
    for foreign in (external, torch.Stream(device="cpu"), CPU.open(0).stream(Role.AUX), object()):
        with pytest.raises(Unsupported):
            npu.adopt(foreign)
    if BACKEND.devices() > 1:
        with pytest.raises(Unsupported, match="npu:0"):
            npu.adopt(native.npu().Stream(device=1))


def test_strangers_are_refused(npu: AscendAccelerator, stream: DeviceStream) -> None:
    with pytest.raises(TypeError, match="another backend"):
        stream.wait(CPU.open(0).event())


def test_streams_do_not_alias_however_often_the_device_is_opened(npu: AscendAccelerator) -> None:
    """The vendor's pool begins again behind its 32nd stream."""
    for _ in range(40):
        BACKEND.open(0).close()
    streams = {npu.stream(role).native.npu_stream for role in Role}
    assert len(streams) == len(Role)


def test_a_launch_of_one_thread_is_whole_to_another(
    npu: AscendAccelerator, stream: DeviceStream
) -> None:
    """The second thread's launch comes while the first one's program is at its middle."""
    number, middle = cell(npu), threading.Event()

    def program() -> None:
        append(number, 1)
        middle.set()
        append(number, 2)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(middle.wait, SOON)
        other = pool.submit(lambda: stream.launch(partial(append, number, 3)))
        stream.launch(program)
        other.result(SOON)
    stream.synchronize(SOON)
    assert int(number) == 123


def test_closing_ends_in_time_and_nothing_more_is_taken(npu: AscendAccelerator) -> None:
    stream, lock = npu.stream(Role.COMPUTE), npu.stream_lock(SOON)
    lock.acquire(stream)
    before = threading.active_count()
    npu.close()
    with pytest.raises(StreamFailed, match="closed"):
        stream.launch(lambda: None)
    assert threading.active_count() == before - 1  # the watchdog of the lock
    fresh = BACKEND.open(0)
    fresh.synchronize(SOON)  # the vendor's stream was let go
    fresh.close()
