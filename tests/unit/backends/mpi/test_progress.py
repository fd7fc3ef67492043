"""Flights and the thread that polls them, over requests that end when the test says so."""

import math
import threading
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.watchdog import WATCHDOG

from equipoise.backends.cpu import BACKEND
from equipoise.backends.mpi.progress import MpiInflightOp, MpiRequest, ProgressThread
from equipoise.backends.mpi.work import MpiWork
from equipoise.hal.errors import CommunicatorFailed, OperationTimeout, ResultPending
from equipoise.hal.stream import Role


class Failure(Exception):
    """Stands for the library's own."""


class Request:
    """Ends when told to; counts how often it was taken back."""

    def __init__(self, outcome: Exception | None = None) -> None:
        self.over = threading.Event()
        self.withdrawn = threading.Event()
        self._outcome = outcome

    def Test(self, status: Any) -> bool:
        if self.over.is_set() and self._outcome is not None:
            raise self._outcome
        return self.over.is_set()

    def Cancel(self) -> None:
        self.withdrawn.set()


class Status:
    def Get_count(self, datatype: object) -> int:
        return 4


@pytest.fixture
def mpi() -> ModuleType:
    module = ModuleType("mpi")
    vars(module).update(Exception=Failure, Status=Status, BYTE=object())
    return module


@pytest.fixture
def progress() -> Iterator[ProgressThread]:
    progress_thread = ProgressThread()
    yield progress_thread
    progress_thread.stop(WATCHDOG)


def work(deadline: float = math.inf) -> tuple[MpiWork, list[CommunicatorFailed | None]]:
    """A handle, and what it tells: its failures, and None for its end."""
    events: list[CommunicatorFailed | None] = []
    return MpiWork("a test", deadline, lambda: events.append(None), events.append), events


def inflight_op(mpi: ModuleType, handle: MpiWork, *requests: MpiRequest) -> MpiInflightOp:
    return MpiInflightOp(mpi, handle, requests, [torch.zeros(1)])


def mpi_request(request: Any, arriving: int | None = None) -> MpiRequest:
    return MpiRequest(request, arriving)


def test_work_ends_with_its_last_request(mpi: ModuleType, progress: ProgressThread) -> None:
    handle, ends = work()
    first, last = Request(), Request()
    progress.add(inflight_op(mpi, handle, mpi_request(first), mpi_request(last)))
    first.over.set()
    with pytest.raises(ResultPending):
        handle.result(0.05)
    assert ends == []
    last.over.set()
    handle.result(WATCHDOG)
    handle.result(0.0)
    assert ends == [None]


def test_cancelled_work_keeps_buffers_until_request_ends(
    mpi: ModuleType, progress: ProgressThread
) -> None:
    """Clauses K1, E4."""
    handle, _ = work()
    request, buffer = Request(), torch.zeros(3)
    freed, alive = threading.Event(), weakref.ref(buffer, lambda _: freed.set())
    progress.add(MpiInflightOp(mpi, handle, [mpi_request(request)], [buffer]))
    del buffer
    handle.cancel()
    with pytest.raises(CommunicatorFailed, match="was cancelled"):
        handle.result(0.0)
    assert alive() is not None
    request.over.set()
    assert freed.wait(WATCHDOG)


def test_cancel_of_ended_work_fails_only_communicator(
    mpi: ModuleType, progress: ProgressThread
) -> None:
    """Clause E4: or it would be a matter of luck."""
    handle, ends = work()
    request = Request()
    request.over.set()
    progress.add(inflight_op(mpi, handle, mpi_request(request)))
    handle.result(WATCHDOG)
    handle.cancel()
    handle.result(0.0)
    assert [type(end) for end in ends] == [type(None), CommunicatorFailed]


def test_deadline_cancels_receives_but_not_sends(mpi: ModuleType, progress: ProgressThread) -> None:
    handle, _ = work(deadline=0.0)
    receive, send = Request(), Request()
    progress.add(inflight_op(mpi, handle, mpi_request(receive, 4), mpi_request(send)))
    assert receive.withdrawn.wait(WATCHDOG)
    assert not send.withdrawn.is_set()


def test_work_deadline_is_reported_once(mpi: ModuleType, progress: ProgressThread) -> None:
    handle, ends = work(deadline=0.02)
    request = Request()
    progress.add(inflight_op(mpi, handle, mpi_request(request)))
    with pytest.raises(OperationTimeout, match="a test passed its deadline"):
        handle.result(WATCHDOG)
    request.over.set()
    other, other_ends = work()
    request_after = Request()
    request_after.over.set()
    progress.add(inflight_op(mpi, other, mpi_request(request_after)))
    other.result(WATCHDOG)
    assert [type(end) for end in ends] == [OperationTimeout, type(None)]
    assert other_ends == [None]


def test_work_raises_mpi_request_error(mpi: ModuleType, progress: ProgressThread) -> None:
    handle, ends = work()
    request = Request(Failure("truncated"))
    request.over.set()
    progress.add(inflight_op(mpi, handle, mpi_request(request, 4)))
    with pytest.raises(CommunicatorFailed, match="a test failed: truncated"):
        handle.result(WATCHDOG)
    assert [type(end) for end in ends] == [CommunicatorFailed, type(None)]


def test_work_fails_on_message_shorter_than_receive(
    mpi: ModuleType, progress: ProgressThread
) -> None:
    """Clause A4."""
    handle, _ = work()
    request = Request()
    request.over.set()
    progress.add(inflight_op(mpi, handle, mpi_request(request, 5)))
    with pytest.raises(CommunicatorFailed, match="of another size"):
        handle.result(WATCHDOG)


def test_progress_stop_ends_waits_and_returns_unfinished_flights(
    mpi: ModuleType,
) -> None:
    """Clause E5."""
    progress, (handle, _) = ProgressThread(), work()
    operation = inflight_op(mpi, handle, mpi_request(Request()))
    progress.add(operation)
    assert progress.stop(WATCHDOG) == (operation,)
    with pytest.raises(CommunicatorFailed, match="was closed"):
        handle.result(0.0)
    late_work, _ = work()
    progress.add(inflight_op(mpi, late_work, mpi_request(Request())))
    assert late_work.done()
    assert not any(thread.name == "equipoise.mpi" for thread in threading.enumerate())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_progress_thread_failure_fails_every_work(mpi: ModuleType) -> None:
    progress, (first, _), (second, _) = ProgressThread(), work(), work()
    failing_request = Request(ZeroDivisionError("a bug"))
    progress.add(inflight_op(mpi, first, mpi_request(Request())))
    progress.add(inflight_op(mpi, second, mpi_request(failing_request)))
    failing_request.over.set()
    for handle in (first, second):
        with pytest.raises(CommunicatorFailed, match=r"lost its progress thread.*a bug"):
            handle.result(WATCHDOG)
    progress.stop(WATCHDOG)


def test_work_wait_on_stream_does_not_block_host(mpi: ModuleType, progress: ProgressThread) -> None:
    """Clause X7."""
    accelerator, (handle, _), states = BACKEND.open(0), work(60.0), []
    stream, request = accelerator.stream(Role.COMPUTE), Request()
    progress.add(inflight_op(mpi, handle, mpi_request(request)))
    handle.wait(stream)
    stream.launch(lambda: states.append(request.over.is_set()))
    assert states == []
    request.over.set()
    stream.synchronize(WATCHDOG)
    accelerator.close()
    assert states == [True]
