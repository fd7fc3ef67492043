"""Many streams that wait for flags at once: each goes on when its own flag is set, in any order.

The order that flags make is not visible to CUDA, which may put a stream that waits and the one that
would let it go on into one queue of the device. A GPU has 32 queues, and does so as soon as more
streams than that have work: 40 that wait, and are let go on in reverse order, stand still for ever
(seen on an H200). So this many fewer are tried. The simulated device has a queue for each stream.
"""

import time

import pytest
import torch
from helpers.harnesses.devices import backend, device_of
from helpers.watchdog import WATCHDOG

from equipoise.backends.cuda import driver_streams
from equipoise.backends.cuda.driver_streams import bind_device
from equipoise.backends.cuda.host_flags import host_flag_pool
from equipoise.backends.devices.accelerator import DeviceAccelerator


@pytest.mark.parametrize("streams", [24])
@pytest.mark.parametrize("kind", ["cuda", pytest.param("cudasim", marks=pytest.mark.deep)])
def test_waiting_streams_go_on_in_reverse_order(kind: str, streams: int) -> None:
    accelerator = backend(kind).open(0)
    assert isinstance(accelerator, DeviceAccelerator)
    device = device_of(accelerator)
    if kind == "cudasim":
        from cudasim import nccl

        make = nccl.new_stream
    else:
        make = driver_streams.new_stream
    bind_device(device)
    lanes = [make(device).stream for _ in range(streams)]
    words = [host_flag_pool(device).take() for _ in lanes]
    values = torch.zeros(streams, dtype=torch.int32).to(device.torch)
    for place, lane in enumerate(lanes):  # the first launch of all loads a kernel, behind nothing
        with device.runtime.current(lane):
            values[place : place + 1].add_(0)
    for lane in lanes:
        lane.synchronize()
    ends = []
    for place, (lane, word) in enumerate(zip(lanes, words, strict=True)):
        with device.runtime.current(lane):
            word.enqueue_wait(lane, 1)
            values[place : place + 1].add_(place)
            ends.append(device.runtime.event())
            ends[-1].record(lane)
    reached_ends = []
    for place in reversed(range(streams)):
        words[place].store(1)
        expiry = time.monotonic() + WATCHDOG
        while not ends[place].query() and time.monotonic() < expiry:
            time.sleep(0.001)
        reached_ends.append(bool(ends[place].query()))
    assert reached_ends == [True] * streams
    assert values.tolist() == list(range(streams))
    accelerator.close()
