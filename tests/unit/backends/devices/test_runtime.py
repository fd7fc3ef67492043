"""The binding of streams, events and graphs, over a torch that only keeps what it is told."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.backends.ascend import private_api
from equipoise.backends.ascend.npu_runtime import NpuRuntime
from equipoise.backends.cuda.cuda_runtime import CudaRuntime
from equipoise.backends.devices.runtime import DeviceRuntime
from equipoise.hal.errors import Unsupported

DEVICES = 3


class Accelerator:
    """`torch.accelerator` for one thread: its device, and the current stream of each device.

    Like torch's, `set_stream` makes the stream's device the thread's.
    """

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.streams: list[Any] = [SimpleNamespace(device_index=i) for i in range(DEVICES)]

    @contextmanager
    def device_index(self, index: int) -> Iterator[None]:
        before, self.device = self.device, index
        try:
            yield
        finally:
            self.device = before

    def set_device_index(self, index: int) -> None:
        self.device = index

    def current_stream(self, index: int) -> Any:
        return self.streams[index]

    def set_stream(self, stream: Any) -> None:
        self.device = stream.device_index
        self.streams[stream.device_index] = stream

    @property
    def state(self) -> tuple[int, tuple[Any, ...]]:
        return self.device, tuple(map(id, self.streams))


@contextmanager
def patched_accelerator(accelerator: Accelerator) -> Iterator[None]:
    """Replaces torch.accelerator, and the thread's device of torch_npu, by `accelerator`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("device_index", "set_device_index", "current_stream", "set_stream"):
            patch.setattr(torch.accelerator, name, getattr(accelerator, name))
        patch.setattr(private_api, "local_device", lambda: accelerator.device)
        yield


class NestingStopped(Exception):
    """Ends all blocks."""


RUNTIMES = st.sampled_from([DeviceRuntime, CudaRuntime, NpuRuntime])
NESTS = st.lists(st.integers(0, DEVICES - 1), max_size=5)


@given(RUNTIMES, NESTS, st.integers(0, DEVICES - 1), st.booleans())
def test_current_restores_stream_and_device_of_each_block(
    kind: type[DeviceRuntime], nest: list[int], device: int, raises: bool
) -> None:
    """Also where blocks of one stream are nested, and where they raise."""
    accelerator, runtime = Accelerator(device), kind()
    streams = [SimpleNamespace(device_index=index) for index in range(DEVICES)]

    def enter(indices: list[int]) -> None:
        before = accelerator.state
        if not indices:
            if raises:
                raise NestingStopped
            return
        stream = streams[indices[0]]
        try:
            with runtime.current(stream):
                assert accelerator.device == indices[0]
                assert accelerator.streams[indices[0]] is stream
                enter(indices[1:])
        finally:
            assert accelerator.state == before

    with patched_accelerator(accelerator):
        if raises:
            with pytest.raises(NestingStopped):
                enter(nest)
        else:
            enter(nest)


def test_npu_current_asks_no_device_of_thread_without_one() -> None:
    """Torch would give the thread the first device; it keeps the stream's instead."""
    accelerator = Accelerator(device=-1)
    with patched_accelerator(accelerator):
        with NpuRuntime().current(SimpleNamespace(device_index=2)):
            assert accelerator.device == 2
        assert accelerator.device == 2


class Module:
    """A vendor's module, as torch.cuda and torch.npu have it."""

    def __init__(self) -> None:
        self.stream_calls: list[str] = []
        self.modes: list[str] = []

    def Stream(self, **which: Any) -> Any:
        self.stream_calls.append("stream")
        return SimpleNamespace(**which)

    def Event(self) -> str:
        return "the vendor's event"

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(capture_begin=self.begin, capture_end=lambda: None)

    NPUGraph = CUDAGraph

    def begin(self, capture_error_mode: str) -> None:
        self.modes.append(capture_error_mode)


@pytest.fixture(params=[CudaRuntime, NpuRuntime])
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = Module()
    device_runtime = request.param()
    monkeypatch.setattr(device_runtime, "module", lambda: module)
    return device_runtime


def test_kept_stream_is_made_once_for_device_and_use(runtime: Any) -> None:
    first = runtime.cached_stream(0, "copy")
    assert runtime.cached_stream(0, "copy") is first
    assert runtime.cached_stream(0, "aux") is not first
    assert runtime.cached_stream(1, "copy") is not first
    assert runtime.module().stream_calls == ["stream"] * 3


def test_event_is_the_modules_own(runtime: Any) -> None:
    """`torch.Event` holds the interpreter's lock while it is recorded or waited for."""
    assert runtime.event() == "the vendor's event"


def test_capture_forbids_nothing_to_other_threads(runtime: Any) -> None:
    runtime.end_capture(runtime.begin_capture())
    expected_mode = {"cuda": "relaxed", "npu": "thread_local"}[runtime.device_type]
    assert runtime.module().modes == [expected_mode]


def test_known_stream_refuses_streams_of_other_devices() -> None:
    runtime = DeviceRuntime()
    runtime.device_type = "cuda"
    with pytest.raises(Unsupported, match="not a stream of cuda:1"):
        runtime.wrap_stream(1, torch.Stream(stream_id=0, device_index=0, device_type=1))
    with pytest.raises(Unsupported, match="not a stream of cuda:1: 'none'"):
        runtime.wrap_stream(1, "none")
