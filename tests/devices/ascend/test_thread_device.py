"""Threads of a rank whose device is not the first: each call must reach that device's queue."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers.watchdog import WATCHDOG

from equipoise.backends.ascend import BACKEND, npu_runtime, private_api
from equipoise.backends.ascend.accelerator import AscendAccelerator
from equipoise.hal.stream import Role


@pytest.fixture
def last() -> Iterator[AscendAccelerator]:
    """The last device, not the first."""
    accelerator = BACKEND.open(BACKEND.devices() - 1)
    yield accelerator
    accelerator.close()
    npu_runtime.RUNTIME.select_device(0)


def on_new_thread(look: Callable[[], list[int]]) -> list[int]:
    """What it finds there."""
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.extend(look()))
    thread.start()
    thread.join(WATCHDOG)
    return results


def test_thread_is_switched_to_device_of_its_streams(last: AscendAccelerator) -> None:
    """Torch leaves it with the first device. Torch_npu would launch a wait from that one's queue
    and the end of the event from the other's: behind it, or before it."""
    index = last.device.index
    assert on_new_thread(lambda: _order(last)) == [0, index, index]


def test_launch_gives_new_thread_device_of_the_stream(last: AscendAccelerator) -> None:
    """Not the first one, on which the driver would make a context for every such thread."""

    def look() -> list[int]:
        devices = [private_api.local_device()]
        last.stream(Role.COMPUTE).launch(lambda: devices.append(private_api.local_device()))
        return [*devices, private_api.local_device()]

    index = last.device.index
    assert on_new_thread(look) == [-1, index, index]


def test_launch_gives_engine_thread_its_device_back(last: AscendAccelerator) -> None:
    def look() -> list[int]:
        npu_runtime.npu().set_device(1)
        devices = list[int]()
        last.stream(Role.COMPUTE).launch(lambda: devices.append(private_api.local_device()))
        return [*devices, private_api.local_device()]

    assert on_new_thread(look) == [last.device.index, 1]


def _order(accelerator: AscendAccelerator) -> list[int]:
    """The thread's device at first, where one stream waits for another, and behind a launch."""
    stream, other, event = (
        accelerator.stream(Role.COMPUTE),
        accelerator.stream(Role.COPY),
        accelerator.event(),
    )
    torch.empty(4, dtype=torch.uint8, device=accelerator.device)
    devices = [npu_runtime.npu().current_device()]
    stream.record(event)
    other.wait(event)
    devices.append(npu_runtime.npu().current_device())
    other.launch(lambda: torch.empty(4, dtype=torch.uint8, device=accelerator.device))
    devices.append(npu_runtime.npu().current_device())
    other.synchronize(WATCHDOG)
    return devices
