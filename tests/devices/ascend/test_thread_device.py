"""Threads of a rank whose device is not the first: each call must reach that device's queue."""

import threading

import torch

from equipoise.backends.ascend import BACKEND, native
from equipoise.backends.ascend.accelerator import AscendAccelerator
from equipoise.hal.stream import Role

SOON = 20.0


def test_thread_is_switched_to_device_of_its_streams() -> None:
    """Torch leaves it with the first device. Torch_npu would launch a wait from that one's queue
    and the end of the event from the other's: behind it, or before it."""
    made = BACKEND.open(BACKEND.devices() - 1)
    try:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.extend(_order(made)))
        thread.start()
        thread.join(SOON)
        assert found == [0, made.device.index, made.device.index]
    finally:
        made.close()
        native.choose(0)


def _order(made: AscendAccelerator) -> list[int]:
    """The thread's device at first, where one stream waits for another, and behind a launch."""
    stream, other, event = made.stream(Role.COMPUTE), made.stream(Role.COPY), made.event()
    torch.empty(4, dtype=torch.uint8, device=made.device)
    devices = [native.npu().current_device()]
    stream.record(event)
    other.wait(event)
    devices.append(native.npu().current_device())
    other.launch(lambda: torch.empty(4, dtype=torch.uint8, device=made.device))
    devices.append(native.npu().current_device())
    other.synchronize(SOON)
    return devices
