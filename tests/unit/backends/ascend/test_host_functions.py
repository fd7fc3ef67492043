"""The share solver's own capture, over a driver that only writes down what it is told."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.backends.ascend import host_functions, npu_runtime, private_api


class Driver:
    """Notes captures; refuses a subscription with the driver's code where the test says so."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refuses = True

    def begin_capture(self) -> str:
        self.calls.append("begin")
        return "graph"

    def end_capture(self, graph: str) -> None:
        self.calls.append("end")

    def subscribe(self, stream: Any) -> None:
        if self.refuses:
            raise RuntimeError("aclrtSubscribeReport: error code is 107011")

    def launch(self, stream: Any, function: Any, job: Any) -> None:
        self.calls.append("launch")


@contextmanager
def current(stream: Any) -> Iterator[None]:
    yield


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake_driver = Driver()
    monkeypatch.setattr(npu_runtime.RUNTIME, "begin_capture", fake_driver.begin_capture)
    monkeypatch.setattr(npu_runtime.RUNTIME, "end_capture", fake_driver.end_capture)
    monkeypatch.setattr(private_api, "subscribe", fake_driver.subscribe)
    monkeypatch.setattr(private_api, "launch_host_function", fake_driver.launch)
    monkeypatch.setattr(npu_runtime.RUNTIME, "current", current)
    monkeypatch.setattr(npu_runtime.RUNTIME, "why_uncapturable", lambda: "")
    monkeypatch.setattr(host_functions, "_subscribed", set())
    return fake_driver


def job() -> Any:
    stream = SimpleNamespace(device_index=0, stream_id=3)
    device = SimpleNamespace(cached_stream=lambda use: stream)
    return SimpleNamespace(stream=SimpleNamespace(device=device))


def test_solver_ends_its_capture_when_subscription_is_refused(driver: Driver) -> None:
    with pytest.raises(RuntimeError, match="107011"):
        host_functions._captured(job())
    assert driver.calls == ["begin", "end"]


def test_solver_captures_again_after_refused_subscription(driver: Driver) -> None:
    with pytest.raises(RuntimeError, match="107011"):
        host_functions._captured(job())
    driver.refuses = False
    assert host_functions._captured(job()) == "graph"
    assert driver.calls == ["begin", "end", "begin", "launch", "end"]
