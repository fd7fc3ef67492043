"""Words that the host and a GPU share, over a driver that only writes down what it is told."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equipoise.backends.cuda import cuda_runtime, host_flags
from equipoise.backends.cuda.host_flags import (
    CACHE_LINE,
    FLAGS_PER_PAGE,
    CudaAcquireFlag,
    CudaReleaseFlag,
    HostFlag,
    HostFlagPool,
)
from equipoise.backends.devices.runtime import Device

MAPPED = 1 << 40
"""What the driver adds to a host address: a device may see it elsewhere."""


class DriverRecorder:
    """The driver's functions, as a list of what was called."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_EQ="equal")
    CUstreamWriteValue_flags = SimpleNamespace(CU_STREAM_WRITE_VALUE_DEFAULT="ordered")
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status = 0
        self.mode = "global"

    def CUstream(self, handle: int) -> int:
        return handle

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[int, str]:
        self.mode, before = mode, self.mode
        return 0, before

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:
        return self.status, address + MAPPED

    def cuStreamWaitValue32(self, *arguments: Any) -> tuple[int]:
        self.calls.append(("wait", *arguments))
        return (self.status,)

    def cuStreamWriteValue32(self, *arguments: Any) -> tuple[int]:
        self.calls.append(("write", *arguments))
        return (self.status,)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> DriverRecorder:
    fake_driver = DriverRecorder()
    monkeypatch.setattr(cuda_runtime, "driver", lambda: fake_driver)
    monkeypatch.setattr(cuda_runtime, "stream_memory", lambda: "")
    monkeypatch.setattr(host_flags, "bind_device", lambda device: None)
    monkeypatch.setattr(host_flags, "pinned", lambda nbytes: torch.ones(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(host_flags, "_pools", {})
    return fake_driver


DEVICE = Device(cuda_runtime.RUNTIME, 0)
STREAM = SimpleNamespace(cuda_stream=77)


def test_acquire_flag_wait_waits_for_one_then_clears(recorder: DriverRecorder) -> None:
    acquire_flag = CudaAcquireFlag(DEVICE)
    acquire_flag.wait(STREAM)
    (kind, stream, place, value, how), (kind2, stream2, place2, value2, how2) = recorder.calls
    assert (kind, stream, value, how) == ("wait", 77, 1, "equal")
    assert (kind2, stream2, value2, how2) == ("write", 77, 0, "ordered")
    assert place == place2 == acquire_flag._flag._address


def test_acquire_flag_signal_stores_without_driver_call(recorder: DriverRecorder) -> None:
    acquire_flag = CudaAcquireFlag(DEVICE)
    acquire_flag.signal()
    assert acquire_flag._flag.value == 1
    assert recorder.calls == []


def test_release_flag_set_is_stream_write_read_by_host(recorder: DriverRecorder) -> None:
    empty = CudaReleaseFlag(DEVICE)
    empty.set(STREAM)
    assert [(call[0], call[3]) for call in recorder.calls] == [("write", 1)]
    assert not empty.is_set()
    empty._flag.store(1)  # as the device would
    assert empty.is_set()
    empty.clear()
    assert not empty.is_set()


def test_host_flag_pool_flags_are_distinct_and_zero(recorder: DriverRecorder) -> None:
    pool = HostFlagPool(DEVICE)
    flags = [pool.take() for _ in range(FLAGS_PER_PAGE + 2)]
    assert len({flag._address for flag in flags}) == len(flags)
    assert all(flag.value == 0 for flag in flags)
    for number, flag in enumerate(flags):
        flag.store(number)
    assert [flag.value for flag in flags] == list(range(len(flags)))


def test_host_flags_have_own_cache_line_and_device_address(recorder: DriverRecorder) -> None:
    pool = HostFlagPool(DEVICE)
    flags = [pool.take() for _ in range(FLAGS_PER_PAGE)]
    (page,) = pool._pages
    begin = page.data_ptr() + MAPPED
    assert sorted(flag._address - begin for flag in flags) == [
        CACHE_LINE * n for n in range(FLAGS_PER_PAGE)
    ]
    for flag in flags:
        assert flag._cell.__array_interface__["data"][0] + MAPPED == flag._address


def test_host_flag_pool_memory_outlives_its_flags(recorder: DriverRecorder) -> None:
    """A stream writes what it was told to, also when its lock is forgotten."""
    first = host_flags.host_flag_pool(DEVICE)
    CudaAcquireFlag(DEVICE)
    assert host_flags.host_flag_pool(DEVICE) is first
    assert len(first._pages) == 1


def test_shelf_allocates_in_relaxed_capture_mode(
    recorder: DriverRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_modes = []

    def pinned(nbytes: int) -> torch.Tensor:
        capture_modes.append(recorder.mode)
        return torch.zeros(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(host_flags, "pinned", pinned)
    HostFlagPool(DEVICE).take()
    assert capture_modes == ["relaxed"]
    assert recorder.mode == "global"


def test_unrestricted_relaxes_capture_mode_without_stream_memory(
    recorder: DriverRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mode is relaxed wherever there are bindings, whatever streams can wait for."""
    monkeypatch.setattr(cuda_runtime, "stream_memory", lambda: "CUDA_LAUNCH_BLOCKING=1 is set")
    with cuda_runtime.RUNTIME.allowed_in_capture():
        assert recorder.mode == "relaxed"
    assert recorder.mode == "global"


def test_host_flag_error_names_driver_call(recorder: DriverRecorder) -> None:
    flag = HostFlagPool(DEVICE).take()
    recorder.status = 801
    with pytest.raises(RuntimeError, match="cuStreamWaitValue32: 801"):
        flag.enqueue_wait(STREAM, 1)
    with pytest.raises(RuntimeError, match="cuStreamWriteValue32: 801"):
        flag.enqueue_write(STREAM, 1)


def test_host_flag_reads_value_stored_by_host() -> None:
    memory = torch.zeros(4, dtype=torch.int32)
    flag = HostFlag(memory.numpy()[1:2], 0)
    flag.store(5)
    assert memory.tolist() == [0, 5, 0, 0]
    assert flag.value == 5


class ContextRecorder(DriverRecorder):
    """A driver that knows which context the calling thread has."""

    def __init__(self) -> None:
        super().__init__()
        self.context = 0

    def cuCtxGetCurrent(self) -> tuple[int, int]:
        return 0, self.context

    def cuDeviceGet(self, index: int) -> tuple[int, str]:
        return 0, f"device {index}"

    def cuDevicePrimaryCtxRetain(self, device: str) -> tuple[int, int]:
        self.calls.append(("retain", device))
        return 0, 5

    def cuCtxSetCurrent(self, context: int) -> tuple[int]:
        self.context = context
        return (0,)


def test_give_context_sets_primary_context_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the device is asked nothing: it may hang, and then the answer would too."""
    contexts = ContextRecorder()
    monkeypatch.setattr(cuda_runtime, "driver", lambda: contexts)
    for _ in range(2):
        cuda_runtime.bind_context(3)
    assert contexts.context == 5
    assert contexts.calls == [("retain", "device 3")]
