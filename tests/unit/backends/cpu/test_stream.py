"""Streams and events of the CPU: clauses E5, E7."""

import threading
import time
from collections.abc import Iterator

import pytest
from helpers.watchdog import WATCHDOG

from equipoise.backends.cpu import BACKEND
from equipoise.backends.cpu.stream import CpuEvent, CpuStream
from equipoise.hal.errors import StreamFailed, StreamTimeout
from equipoise.hal.stream import Role


@pytest.fixture
def stream() -> Iterator[CpuStream]:
    compute_stream = CpuStream(Role.COMPUTE, "test")
    yield compute_stream
    compute_stream.close(WATCHDOG)


@pytest.fixture
def other() -> Iterator[CpuStream]:
    copy_stream = CpuStream(Role.COPY, "test")
    yield copy_stream
    copy_stream.close(WATCHDOG)


def launch_until_refused(stream: CpuStream) -> None:
    expiry = time.monotonic() + WATCHDOG
    while time.monotonic() < expiry:
        stream.launch(lambda: None)


def fail() -> None:
    raise ZeroDivisionError("on purpose")


def test_stream_refuses_foreign_event(stream: CpuStream) -> None:
    with pytest.raises(TypeError, match="another backend"):
        stream.record(object())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="another backend"):
        stream.wait(object())  # type: ignore[arg-type]


def test_nested_launch_runs_in_place(stream: CpuStream) -> None:
    log: list[str] = []

    def outer() -> None:
        stream.launch(lambda: log.append("inner"))
        log.append("outer")

    stream.launch(outer)
    stream.launch(lambda: log.append("next"))
    stream.synchronize(WATCHDOG)
    assert log == ["inner", "outer", "next"]


def test_program_may_synchronize_its_own_stream(stream: CpuStream) -> None:
    log: list[str] = []

    def outer() -> None:
        stream.synchronize(WATCHDOG)
        log.append("outer")

    stream.launch(outer)
    stream.synchronize(WATCHDOG)
    assert log == ["outer"]


def test_stream_failure_reaches_waiters_of_later_event(stream: CpuStream, other: CpuStream) -> None:
    gate, point, values = threading.Event(), CpuEvent(), []
    stream.launch(lambda: gate.wait(WATCHDOG))
    stream.launch(fail)
    stream.record(point)
    other.wait(point)
    other.launch(lambda: values.append(1))
    gate.set()
    with pytest.raises(StreamFailed, match="on purpose"):
        point.synchronize(WATCHDOG)
    with pytest.raises(StreamFailed, match="on purpose"):
        other.synchronize(WATCHDOG)
    assert values == []


def test_record_on_failed_stream_fails_event(stream: CpuStream, other: CpuStream) -> None:
    """Else whoever waits for the event would wait for a point that can never come."""
    point = CpuEvent()
    stream.record(point)
    stream.launch(fail)
    with pytest.raises(StreamFailed):
        stream.synchronize(WATCHDOG)
    with pytest.raises(StreamFailed):
        stream.record(point)
    with pytest.raises(StreamFailed, match="on purpose"):
        point.synchronize(WATCHDOG)
    other.wait(point)
    with pytest.raises(StreamFailed, match="on purpose"):
        other.synchronize(WATCHDOG)


def test_synchronize_timeout_leaves_stream_running(stream: CpuStream) -> None:
    gate, values = threading.Event(), []
    stream.launch(lambda: gate.wait(WATCHDOG))
    stream.launch(lambda: values.append(1))
    with pytest.raises(StreamTimeout, match=r"test.compute was not reached within 0.02 s"):
        stream.synchronize(0.02)
    gate.set()
    stream.synchronize(WATCHDOG)
    assert values == [1]


def test_stream_starts_no_thread_before_first_launch() -> None:
    before = threading.active_count()
    accelerator = BACKEND.open(0)
    streams = [accelerator.stream(role) for role in Role]
    accelerator.event()
    accelerator.synchronize(WATCHDOG)
    assert threading.active_count() == before
    streams[0].launch(lambda: None)
    assert threading.active_count() == before + 1
    accelerator.close()
    assert threading.active_count() == before


def test_close_runs_queued_and_nested_launches() -> None:
    stream, gate, log = CpuStream(Role.AUX, "test"), threading.Event(), []
    stream.launch(lambda: gate.wait(WATCHDOG))
    stream.launch(lambda: stream.launch(lambda: log.append("nested")))
    closer = threading.Thread(target=stream.close, args=(WATCHDOG,))
    closer.start()
    with pytest.raises(StreamFailed, match="was closed"):
        launch_until_refused(stream)
    gate.set()
    closer.join(WATCHDOG)
    assert not closer.is_alive()
    assert log == ["nested"]


def test_close_of_hanging_stream_is_bounded() -> None:
    stream, gate = CpuStream(Role.AUX, "test"), threading.Event()
    stream.launch(gate.wait)
    closer = threading.Thread(target=stream.close, args=(0.01,), daemon=True)
    closer.start()
    closer.join(WATCHDOG)
    closer_returned = not closer.is_alive()
    gate.set()
    assert closer_returned


def test_closed_stream_refuses_launch() -> None:
    stream = CpuStream(Role.AUX, "test")
    stream.launch(lambda: None)
    stream.close(WATCHDOG)
    before = threading.active_count()
    with pytest.raises(StreamFailed, match=r"test\.aux was closed"):
        stream.launch(lambda: None)
    stream.close(WATCHDOG)
    assert threading.active_count() == before


def test_concurrent_launches_run_on_one_thread(stream: CpuStream) -> None:
    thread_ids: list[int] = []
    together = threading.Barrier(4)

    def launch_many() -> None:
        together.wait(WATCHDOG)
        for _ in range(50):
            stream.launch(lambda: thread_ids.append(threading.get_ident()))

    threads = [threading.Thread(target=launch_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WATCHDOG)
    stream.synchronize(WATCHDOG)
    assert len(thread_ids) == 200
    assert len(set(thread_ids)) == 1
