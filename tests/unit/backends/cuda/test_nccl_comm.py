"""What a communicator over NCCL calls, and in which order; on devices that only write it down."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.backends.cuda import cuda_runtime
from equipoise.backends.cuda.driver_streams import DriverStream, DriverStreamPool
from equipoise.backends.cuda.nccl_api import NcclCommHandle, NcclError
from equipoise.backends.cuda.nccl_comm import NcclComm
from equipoise.backends.devices.runtime import Device

HANDLE = 77
CURRENT = "the current stream"


class CallLog(list[tuple[Any, ...]]):
    """Everything that happened, in order."""


class Lane:
    def __init__(self) -> None:
        self.idle = True

    def query(self) -> bool:
        return self.idle


class Event:
    def __init__(self, call_log: CallLog) -> None:
        self._call_log = call_log
        self.completed = False

    def record(self, stream: Any) -> None:
        self._call_log.append(("record", stream))

    def wait(self, stream: Any) -> None:
        self._call_log.append(("wait", stream))

    def query(self) -> bool:
        return self.completed


class Nccl:
    """NCCL's functions by the names of `NcclApi`; ends block until the test lets them go."""

    def __init__(self, call_log: CallLog) -> None:
        self._call_log = call_log
        self.error = ""
        self.progress: list[bool] = []
        self.ends = threading.Event()
        self.ends.set()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._call_log.append((name, *arguments))

    @contextmanager
    def group(self, comm: NcclCommHandle) -> Iterator[None]:
        self._call_log.append(("begin",))
        yield
        self._call_log.append(("end",))

    def async_error(self, comm: NcclCommHandle) -> str:
        return self.error

    def in_progress(self, comm: NcclCommHandle) -> bool:
        self._call_log.append(("look",))
        return self.progress.pop() if self.progress else False

    def abort(self, comm: NcclCommHandle) -> None:
        self.ends.wait(WATCHDOG)
        self._call_log.append(("abort", comm))

    def destroy(self, comm: NcclCommHandle) -> None:
        self.ends.wait(WATCHDOG)
        self._call_log.append(("destroy", comm))


class Bench:
    """A group of three, in which this is rank 1."""

    def __init__(self) -> None:
        self.call_log = CallLog()
        self.nccl = Nccl(self.call_log)
        self.events: list[Event] = []
        vendor: Any = SimpleNamespace(
            device_type="cpu",
            set_thread_device=lambda index: None,
            current=self._current,
            current_stream=lambda index: CURRENT,
            event=self._event,
            allowed_in_capture=nullcontext,
        )
        self.lane = Lane()
        self.streams = DriverStreamPool(lambda: DriverStream(self.lane, HANDLE))
        self.comm = NcclCommHandle(5)
        api: Any = self.nccl
        device = Device(vendor, 0)
        self.group = NcclComm(api, self.comm, (1, 3), self.streams, device, WATCHDOG)
        self.call_log.clear()

    def calls(self, *names: str) -> list[tuple[Any, ...]]:
        return [entry for entry in self.call_log if entry[0] in names]

    @contextmanager
    def _current(self, stream: Any) -> Iterator[None]:
        yield

    def _event(self) -> Event:
        self.events.append(Event(self.call_log))
        return self.events[-1]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    tensor_to = Tensor.to
    # The fake device has no memory of its own, and an index that torch knows no CPU by.
    monkeypatch.setattr(Tensor, "to", lambda self, *where: tensor_to(self, "cpu"))
    # Where there is a GPU, the driver would be asked, which this process has not initialised.
    monkeypatch.setattr(cuda_runtime.RUNTIME, "allowed_in_capture", nullcontext)
    return Bench()


def put(count: int, dtype: torch.dtype = torch.int8) -> Tensor:
    return torch.zeros(count, dtype=dtype)


def test_operation_is_ordered_after_current_stream(bench: Bench) -> None:
    value = put(4, torch.int32)
    handle = bench.group.all_reduce(value)
    assert bench.call_log == [
        ("record", CURRENT),
        ("wait", bench.lane),
        ("all_reduce", value.data_ptr(), 4, 2, bench.comm, HANDLE),
        ("look",),
        ("record", bench.lane),
    ]
    assert not handle.is_complete()
    bench.events[-1].completed = True
    assert handle.is_complete()
    handle.block_stream()
    assert bench.call_log[-1] == ("wait", CURRENT)


def test_end_is_recorded_only_after_nccl_has_launched(bench: Bench) -> None:
    """A non-blocking communicator launches on a thread of NCCL's."""
    bench.nccl.progress = [True, True]
    bench.group.all_reduce(put(1))
    assert [entry[0] for entry in bench.call_log[-5:]] == ["all_reduce", *["look"] * 3, "record"]


def test_launch_that_does_not_come_through_fails(bench: Bench) -> None:
    """As where an algorithm connects at its first use, and a peer is not there."""
    bench.group._deadline = 0.01
    bench.nccl.progress = [True] * 100_000
    with pytest.raises(NcclError, match=r"NCCL did not launch within 0\.01 s"):
        bench.group.all_reduce(put(1))
    assert bench.call_log[-1] == ("look",)


def test_close_finalizes_and_waits_before_it_destroys(bench: Bench) -> None:
    bench.nccl.progress = [True]
    bench.group.close()
    _until_closed(bench.group)
    assert [entry[0] for entry in bench.call_log] == ["finalize", "look", "look", "destroy"]


def test_close_aborts_what_does_not_finalize(bench: Bench) -> None:
    bench.group._deadline = 0.01
    bench.nccl.progress = [True] * 100_000
    bench.group.close()
    _until_closed(bench.group)
    assert bench.calls("destroy", "abort") == [("abort", bench.comm)]


@pytest.mark.parametrize("operation", ["isend", "irecv"])
def test_message_is_answered_in_same_group(bench: Bench, operation: str) -> None:
    bench.group.message(operation, put(7), 2)
    send_size, receive_size = (7, 1) if operation == "isend" else (1, 7)
    assert launched_together(bench) == [("receive", receive_size, 2), ("send", send_size, 2)]


def test_batch_is_one_group_without_answers(bench: Bench) -> None:
    incoming, outgoing = put(5), put(7)
    bench.group.batch(["irecv", "isend", "isend"], [incoming, outgoing, incoming], [0, 0, 2])
    assert launched_together(bench) == [("receive", 5, 0), ("send", 7, 0), ("send", 5, 2)]


def launched_together(bench: Bench) -> list[tuple[str, int, int]]:
    """Messages between the begin and the end of a group: which call, bytes, peer."""
    (begin,), (end,) = bench.calls("begin"), bench.calls("end")
    inside = bench.call_log[bench.call_log.index(begin) + 1 : bench.call_log.index(end)]
    return [(name, nbytes, peer) for name, _, nbytes, peer, *_ in inside]


def test_uneven_all_to_all_skips_empty_parts_and_includes_own(
    bench: Bench,
) -> None:
    incoming, outgoing = put(9), put(6)
    bench.group.all_to_all(incoming, outgoing, [4, 5, 0], [0, 5, 1])
    messages = [
        (name, address - tensor.data_ptr(), nbytes, peer)
        for name, tensor in (("receive", incoming), ("send", outgoing))
        for _, address, nbytes, peer, *_ in bench.calls(name)
    ]
    assert messages == [
        ("receive", 0, 4, 0),
        ("receive", 4, 5, 1),
        ("send", 0, 5, 1),
        ("send", 5, 1, 2),
    ]


def test_even_all_to_all_sends_equal_parts(bench: Bench) -> None:
    bench.group.all_to_all(put(6), put(6), (), ())
    assert [(c[2], c[3]) for c in bench.calls("send")] == [(2, 0), (2, 1), (2, 2)]


def test_handle_raises_network_error_of_unfinished_operation(
    bench: Bench,
) -> None:
    handle = bench.group.all_reduce(put(1))
    bench.nccl.error = "remote process exited"
    with pytest.raises(NcclError, match="remote process exited"):
        handle.is_complete()
    bench.events[-1].completed = True
    assert handle.is_complete()
    assert handle.error() == "remote process exited"


@pytest.mark.parametrize("operation", ["abort", "close"])
def test_abort_and_close_do_not_block_and_run_once(bench: Bench, operation: str) -> None:
    bench.nccl.ends.clear()
    bench.nccl.error = "remote process exited"
    getattr(bench.group, operation)()
    bench.group.close()
    assert not bench.group.closed
    assert bench.group.error() == ""  # the communicator is not asked any more: it may be gone
    with pytest.raises(NcclError, match="given back"):
        bench.group.all_reduce(put(1))
    bench.nccl.ends.set()
    _until_closed(bench.group)
    assert bench.calls("abort", "destroy") == [
        ("abort" if operation == "abort" else "destroy", bench.comm)
    ]


def test_own_stream_is_reused_only_when_idle(bench: Bench) -> None:
    bench.lane.idle = False
    bench.group.abort()
    _until_closed(bench.group)
    bench.streams._make = lambda: DriverStream(Lane(), 1)
    assert bench.streams.take().handle == 1
    bench.lane.idle = True
    assert bench.streams.take().handle == HANDLE
    assert bench.streams.take().handle == 1


def _until_closed(group: NcclComm) -> None:
    timer = threading.Event()
    for _ in range(1000):
        if group.closed:
            return
        timer.wait(WATCHDOG / 1000)
    raise AssertionError("it was not given back")
