"""Handles of operations, on operations that end as the test says: clauses E1, E3, E4, K1 to K5."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

from equipoise.backends.devices.collectives.ccl import DeferredEvent
from equipoise.backends.devices.collectives.watchdog import Watchdog
from equipoise.backends.devices.collectives.work import (
    DeviceWork,
    InflightOp,
    OpStatus,
    StreamReleaser,
)
from equipoise.backends.devices.runtime import Device
from equipoise.hal.errors import CommunicatorFailed, OperationTimeout

LONG, SHORT = 60.0, 0.02
VENDOR: Any = SimpleNamespace(set_thread_device=lambda index: None)
DEVICE = Device(VENDOR, 0)


def no_promise() -> DeferredEvent:
    raise AssertionError("nobody waits for what was not launched")


BELL = StreamReleaser(DEVICE, None, no_promise)


class Operation:
    """An operation on a device that does what the test wants."""

    def __init__(self) -> None:
        self.completed = False
        self.sound = True
        self.message = ""
        self.waits = 0

    def block_stream(self) -> None:
        self.waits += 1

    def is_complete(self) -> bool:
        if self.message:
            raise RuntimeError(f"{self.message}\nand a page of stack")
        return self.completed

    def error(self) -> str:
        return "" if self.sound else "the network is gone"


class Failures(list[CommunicatorFailed]):
    """The failures that a work reports to its communicator."""


def make_work(deadline: float = LONG) -> tuple[DeviceWork, Operation, Failures]:
    failures = Failures()
    work, operation = DeviceWork("all_reduce of 'x'", deadline, failures.append, BELL), Operation()
    work.set_inflight(InflightOp(operation, (), DEVICE), None)
    return work, operation, failures


def test_work_is_done_when_device_finishes() -> None:
    work, operation, failures = make_work()
    assert not work.done()
    operation.completed = True
    assert work.done()
    work.result(0.0)
    assert not failures


def test_work_past_deadline_fails_itself_and_communicator() -> None:
    work, operation, failures = make_work(SHORT)
    with pytest.raises(OperationTimeout, match="all_reduce of 'x' passed its deadline"):
        work.result(LONG)
    assert [type(failure) for failure in failures] == [OperationTimeout]
    operation.completed = True
    with pytest.raises(OperationTimeout):
        work.result(0.0)


def test_work_finished_before_query_ignores_passed_deadline() -> None:
    work, operation, failures = make_work(0.0)
    operation.completed = True
    work.result(0.0)
    assert not failures


def test_work_reports_device_error_in_one_line() -> None:
    work, operation, failures = make_work()
    operation.message = "ERR02200 DIST"
    assert work.done()
    with pytest.raises(CommunicatorFailed, match=r"failed on the device: ERR02200 DIST$"):
        work.result(0.0)
    assert len(failures) == 1


def test_work_fails_with_fault_reported_by_library() -> None:
    work, operation, _ = make_work()
    operation.completed, operation.sound = True, False
    assert work.done()
    with pytest.raises(CommunicatorFailed, match="failed on the device: the network is gone"):
        work.result(0.0)


def test_cancelled_work_fails_and_keeps_buffers() -> None:
    failures = Failures()
    work, operation = DeviceWork("irecv of 'x'", LONG, failures.append, BELL), Operation()
    buffer = torch.zeros(3)
    flight, buffer_reference = InflightOp(operation, (buffer,), DEVICE), ref(buffer)
    work.set_inflight(flight, None)
    del buffer
    work.cancel()
    with pytest.raises(CommunicatorFailed, match="was cancelled"):
        work.result(0.0)
    assert flight.poll() is OpStatus.IN_FLIGHT
    assert buffer_reference() is not None
    operation.completed = True
    assert flight.poll() is OpStatus.DONE
    assert buffer_reference() is None
    assert len(failures) >= 1


def test_work_wait_holds_stream_only_before_end() -> None:
    class Stream:
        def launch(self, program: Callable[[], object]) -> None:
            program()

    work, operation, _ = make_work()
    work.wait(Stream())  # type: ignore[arg-type]
    assert operation.waits == 1
    operation.completed = True
    work.result(0.0)
    work.wait(Stream())  # type: ignore[arg-type]
    assert operation.waits == 1


def test_work_wait_raises_after_failure() -> None:
    work, _, _ = make_work()
    work.cancel()
    with pytest.raises(CommunicatorFailed, match="was cancelled"):
        work.wait(None)  # type: ignore[arg-type]


def test_watchdog_fails_work_past_deadline() -> None:
    watchdog = Watchdog("library", lambda: False)
    failures = Failures()
    failure_event = threading.Event()

    def on_failure(failure: CommunicatorFailed) -> None:
        failures.append(failure)
        failure_event.set()

    later = DeviceWork("barrier of 'y'", LONG, on_failure, BELL)
    soon = DeviceWork("isend of 'y'", SHORT, on_failure, BELL)
    for work in (later, soon):
        work.set_inflight(InflightOp(Operation(), (), DEVICE), None)
        watchdog.watch(work)
    assert failure_event.wait(LONG)
    assert "isend of 'y' passed its deadline" in str(failures[0])
    assert not later.has_ended
    watchdog.stop(LONG)
    assert later.has_ended
    with pytest.raises(CommunicatorFailed, match="was closed with its fabric"):
        later.result(0.0)


def test_stopped_watchdog_ends_new_work_at_once() -> None:
    watchdog = Watchdog("library", lambda: False)
    watchdog.stop(LONG)
    work, _, _ = make_work()
    watchdog.watch(work)
    assert work.has_ended


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_watchdog_fails_watched_work_with_cause() -> None:
    def raise_error() -> bool:
        raise OSError("no more memory")

    watchdog = Watchdog("library", raise_error)
    work, _, _ = make_work()
    watchdog.watch(work)
    watchdog.start_teardown()
    expiry = time.monotonic() + LONG
    while not work.has_ended and time.monotonic() < expiry:
        time.sleep(SHORT)
    with pytest.raises(CommunicatorFailed, match=r"lost its watchdog.*no more memory"):
        work.result(0.0)
    watchdog.stop(LONG)  # its thread has ended: it would else fail in the middle of another test
