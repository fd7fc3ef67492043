"""What the driver is told of threads that capture, and of queues, without a GPU."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equipoise.backends.cuda import cuda_runtime
from equipoise.backends.devices.event import DeviceRecording
from equipoise.backends.devices.runtime import Device

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


class Driver:
    """Records the capture modes that threads are set to."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_NOT_INITIALIZED=3)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.initialised = False

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return (0, 1) if self.initialised else (3, 0)

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[int, str]:
        self.calls.append(mode)
        return 0, "global"


class RecordedEvent:
    """An event of torch's."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def record(self, stream: Any) -> None:
        self._calls.append("record")

    def query(self) -> bool:
        self._calls.append("asked")
        return True


class Devices:
    """The current device, of every thread."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls
        self.current = 0
        self.initialised = False
        self.queue_counts: list[str | None] = []
        self.on_count: Callable[[], None] = lambda: None

    def Event(self) -> RecordedEvent:
        return RecordedEvent(self._calls)

    def is_initialized(self) -> bool:
        return self.initialised

    def device_count(self) -> int:
        self.queue_counts.append(os.environ.get(QUEUES))
        self.on_count()
        return 1

    def mem_get_info(self, index: int) -> tuple[int, int]:
        self.queue_counts.append(os.environ.get(QUEUES))
        return 1, 1

    def set_device_index(self, index: int) -> None:
        if not self.initialised:
            self.queue_counts.append(os.environ.get(QUEUES))
        self.initialised = True
        self.current = index


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake_driver = Driver()
    devices = Devices(fake_driver.calls)
    monkeypatch.setattr(cuda_runtime, "driver", lambda: fake_driver)
    monkeypatch.setattr(cuda_runtime, "cuda", lambda: devices)
    monkeypatch.setattr(torch.accelerator, "set_device_index", devices.set_device_index)
    monkeypatch.setattr(cuda_runtime, "_thread_state", cuda_runtime._Thread())
    return fake_driver


def test_set_thread_device_relaxes_own_thread_once(driver: Driver) -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="equipoise.transfer") as one:
        for _ in range(3):
            one.submit(cuda_runtime.RUNTIME.set_thread_device, 1).result()
    assert driver.calls == ["relaxed"]
    assert cuda_runtime.cuda().current == 1


def test_set_thread_device_keeps_capture_mode_of_engine_threads(driver: Driver) -> None:
    """It may capture itself, in the mode in which the driver checks for it."""
    with ThreadPoolExecutor(1, thread_name_prefix="engine") as one:
        one.submit(cuda_runtime.RUNTIME.set_thread_device, 0).result()
    cuda_runtime.RUNTIME.set_thread_device(0)
    assert driver.calls == []


def test_event_query_relaxes_capture_mode_for_the_look_only(driver: Driver) -> None:
    mark = DeviceRecording(Device(cuda_runtime.RUNTIME, 0))
    mark.record("stream")
    driver.calls.clear()
    assert mark.is_complete()
    assert driver.calls == ["relaxed", "asked", "global"]


def test_event_query_of_relaxed_thread_exchanges_nothing(driver: Driver) -> None:
    def is_complete() -> bool:
        return DeviceRecording(Device(cuda_runtime.RUNTIME, 0)).is_complete()

    with ThreadPoolExecutor(1, thread_name_prefix="equipoise.transfer") as one:
        assert one.submit(is_complete).result()
    assert driver.calls == ["relaxed", "asked"]


def test_set_thread_device_works_without_driver(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_import_error() -> Any:
        raise ImportError("no cuda-bindings")

    monkeypatch.setattr(cuda_runtime, "driver", raise_import_error)
    with ThreadPoolExecutor(1) as one:
        one.submit(cuda_runtime.RUNTIME.set_thread_device, 2).result()
    assert cuda_runtime.cuda().current == 2


@pytest.fixture
def devices(driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Nothing is initialised, and nobody has set anything."""
    monkeypatch.delenv(QUEUES, raising=False)
    monkeypatch.setattr(cuda_runtime, "_queues", None)
    monkeypatch.setattr(cuda_runtime.RUNTIME, "_selected_index", None)
    monkeypatch.setattr(cuda_runtime, "INITIAL", tmp_path / "environ")
    return cuda_runtime.cuda()


def test_choose_asks_for_queues_and_restores_environment(devices: Any) -> None:
    assert cuda_runtime.shared_queues() == ""
    cuda_runtime.RUNTIME.select_device(0)
    cuda_runtime.RUNTIME.select_device(1)
    assert devices.queue_counts == ["32"] * 3  # the initialisation, and the context of each device
    assert QUEUES not in os.environ
    assert cuda_runtime.shared_queues() == ""


def test_queues_are_shared_where_others_initialised_cuda(devices: Any) -> None:
    devices.initialised = True
    assert (
        "CUDA was initialised without CUDA_DEVICE_MAX_CONNECTIONS=32"
        in cuda_runtime.shared_queues()
    )
    os.environ[QUEUES] = "32"  # too late
    cuda_runtime.RUNTIME.select_device(0)
    assert "CUDA was initialised without" in cuda_runtime.shared_queues()


def test_queues_are_shared_where_torch_only_asked_for_devices(devices: Any, driver: Driver) -> None:
    """`torch.cuda.is_available()` initialises the driver, and torch goes on saying that it did
    not."""
    driver.initialised = True
    assert "CUDA was initialised without" in cuda_runtime.shared_queues()
    cuda_runtime.RUNTIME.select_device(0)
    assert devices.queue_counts == [None]
    assert "CUDA was initialised without" in cuda_runtime.shared_queues()


def test_counting_devices_asks_for_queues(devices: Any, driver: Driver) -> None:
    assert cuda_runtime.RUNTIME.devices() == 1
    assert devices.queue_counts == ["32"]
    assert cuda_runtime.shared_queues() == ""
    driver.initialised = True  # by somebody else: counting had not
    assert "CUDA was initialised without" in cuda_runtime.shared_queues()


def test_counting_devices_that_initialises_asked_for_queues(devices: Any, driver: Driver) -> None:
    devices.on_count = lambda: setattr(driver, "initialised", True)
    assert cuda_runtime.RUNTIME.devices() == 1
    assert cuda_runtime.shared_queues() == ""


def test_queues_of_initial_environment_count_whoever_initialised_cuda(devices: Any) -> None:
    devices.initialised = True
    cuda_runtime.INITIAL.write_bytes(b"A=1\0CUDA_DEVICE_MAX_CONNECTIONS=32\0B=2\0")
    assert cuda_runtime.shared_queues() == ""
    cuda_runtime.INITIAL.write_bytes(b"CUDA_DEVICE_MAX_CONNECTIONS=8\0")
    assert "CUDA_DEVICE_MAX_CONNECTIONS=8 is set" in cuda_runtime.shared_queues()


def test_choose_keeps_fewer_queues_that_the_user_set(
    devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(QUEUES, "8")
    cuda_runtime.RUNTIME.select_device(0)
    assert set(devices.queue_counts) == {"8"}
    assert os.environ[QUEUES] == "8"
    assert "CUDA_DEVICE_MAX_CONNECTIONS=8 is set" in cuda_runtime.shared_queues()


def test_ask_for_queues_sets_them_for_children_before_cuda_only(
    devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_runtime.request_queues()
    assert os.environ.pop(QUEUES) == "32"
    devices.initialised = True  # by an engine's worker
    assert cuda_runtime.shared_queues() == ""
    monkeypatch.setattr(cuda_runtime, "_queues", None)
    cuda_runtime.request_queues()
    assert os.environ.pop(QUEUES) == "32"
    assert "CUDA was initialised without" in cuda_runtime.shared_queues()
