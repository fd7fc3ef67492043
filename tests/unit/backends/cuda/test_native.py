"""Threads of ours beside an engine that captures, without a GPU: what the driver is told."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.backends.cuda import native


class Driver:
    """Notes what threads are set to."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")

    def __init__(self) -> None:
        self.told: list[str] = []

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[int, str]:
        self.told.append(mode)
        return 0, "global"


class Devices:
    """The current device, of every thread."""

    def __init__(self) -> None:
        self.current = 0

    def current_device(self) -> int:
        return self.current

    def set_device(self, index: int) -> None:
        self.current = index


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made, devices = Driver(), Devices()
    monkeypatch.setattr(native, "driver", lambda: made)
    monkeypatch.setattr(native, "cuda", lambda: devices)
    monkeypatch.setattr(native, "_this", native._Thread())
    return made


def test_settle_thread_relaxes_capture_mode_once(driver: Driver) -> None:
    with ThreadPoolExecutor(1) as one:
        for _ in range(3):
            one.submit(native.settle_thread, 1).result()
    assert driver.told == ["relaxed"]
    assert native.cuda().current == 1


def test_settle_thread_keeps_capture_mode_of_main_thread(driver: Driver) -> None:
    native.settle_thread(0)
    assert driver.told == []


def test_settle_thread_sets_device_without_driver(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise ImportError("no cuda-bindings")

    monkeypatch.setattr(native, "driver", missing)
    with ThreadPoolExecutor(1) as one:
        one.submit(native.settle_thread, 2).result()
    assert native.cuda().current == 2
