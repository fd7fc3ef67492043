"""What a channel keeps, aborts and gives back, on a group that does what the test says."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

from equipoise.backends.devices.collectives.ccl import CommSpec, WarmupOps
from equipoise.backends.devices.collectives.comm_memory import COMM_MEMORY
from equipoise.backends.devices.collectives.comm_stream import CommStream
from equipoise.backends.devices.issue_lock import IssueLock
from equipoise.backends.devices.runtime import Device
from equipoise.backends.devices.stream import DeviceStream
from equipoise.hal.errors import CommunicatorFailed, StreamFailed
from equipoise.hal.stream import Role

VENDOR: Any = SimpleNamespace(
    set_thread_device=lambda index: None, current=lambda stream: SimpleNamespace()
)
DEVICE = Device(VENDOR, 0)
FAILURE = CommunicatorFailed("it was aborted")


class Operation:
    def __init__(self) -> None:
        self.over = False
        self.message = ""

    def block_stream(self) -> None:
        """Nothing to hold up."""

    def is_complete(self) -> bool:
        if self.message:
            raise RuntimeError(self.message)
        return self.over

    def error(self) -> str:
        return ""


class Group:
    """Notes what became of streams at the moment of its abort."""

    stream = None

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.closed = False
        self.stream_failure: Callable[[], str] = lambda: ""

    def abort(self) -> None:
        self.aborted.append(self.stream_failure())

    def close(self) -> None:
        self.closed = True


class Bench:
    def __init__(self, aborts: bool) -> None:
        self.group = Group()
        self.greeting = Operation()
        self.greeting.over = True
        capabilities = SimpleNamespace(abort=aborts)
        library: Any = SimpleNamespace(capabilities=capabilities, estimate_bytes=lambda link: 5)
        group: Any = self.group
        members = CommSpec("tried", (0, 1), 0, is_link=True, deadline=20.0)
        greeting = WarmupOps(self.greeting, (), torch.zeros(1, dtype=torch.int8))
        self.channel = CommStream(members, library, group, DEVICE, greeting)

    def launch(self, *buffers: torch.Tensor) -> Operation:
        operation = Operation()
        self.channel.launch(lambda group: operation, buffers)
        return operation


@pytest.fixture
def bench() -> Bench:
    return Bench(aborts=True)


def stream() -> DeviceStream:
    class NullContext:
        def __enter__(self) -> None:
            """Current."""

        def __exit__(self, *error: object) -> None:
            """No more."""

    vendor: Any = SimpleNamespace(current=lambda native: NullContext())
    return DeviceStream(Role.COMPUTE, "compute", Device(vendor, 0), None, IssueLock())


def test_comm_stream_abort_fails_waiting_streams_before_release(bench: Bench) -> None:
    operation, waiting_stream = Operation(), stream()
    flight = bench.channel.launch(lambda group: operation, ())
    flight.block_stream(waiting_stream)
    bench.group.stream_failure = lambda: str(waiting_stream._failure)
    bench.channel.abort(FAILURE)
    assert bench.group.aborted == ["it was aborted"]
    with pytest.raises(StreamFailed, match="it was aborted"):
        waiting_stream.launch(lambda: None)


def test_aborted_comm_stream_keeps_buffers_until_device_is_done(bench: Bench) -> None:
    buffer = torch.zeros(3)
    buffer_reference, operation = ref(buffer), bench.launch(buffer)
    del buffer
    bench.channel.abort(FAILURE)
    bench.group.closed = True
    assert not bench.channel.is_released()
    assert buffer_reference() is not None
    operation.over = True
    assert bench.channel.is_released()
    assert buffer_reference() is None
    assert "tried" not in [holding.name for holding in COMM_MEMORY.entries()]


def test_comm_stream_with_network_error_is_collected_only_after_abort(bench: Bench) -> None:
    operation = bench.launch()
    operation.message = "the network is gone"
    assert not bench.channel.collect_completed()
    operation.message, operation.over = "", True
    assert not bench.channel.collect_completed()  # whether it still uses the buffers nobody knows
    bench.channel.abort(FAILURE)
    assert bench.channel.collect_completed()


def test_comm_stream_does_not_abort_unsupporting_library() -> None:
    bench = Bench(aborts=False)
    bench.launch()
    bench.channel.abort(FAILURE)
    assert bench.group.aborted == []
    assert not bench.channel.aborted


def test_closed_comm_stream_ignores_abort(bench: Bench) -> None:
    bench.channel.close()
    bench.channel.abort(FAILURE)
    assert bench.group.aborted == []
    assert bench.channel.is_released()


def test_comm_stream_interrupted_in_launch_is_idle_only_after_abort(bench: Bench) -> None:
    """What was called of a round by then may run, or not."""

    def launch(group: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.channel.launch(launch, ())
    assert not bench.channel.collect_completed()
    bench.channel.abort(FAILURE)
    assert bench.channel.collect_completed()
    assert bench.group.aborted == [""]
