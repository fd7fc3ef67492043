"""TensorRT-LLM's deadlock (tech blog 8): launches that stand behind a lock, and the copy that would
release it. Clauses L5, O6.

There a launch held the driver's lock while it waited for room behind a spinning kernel, and the
copy that the kernel waited for needed that lock.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from helpers.harnesses.devices import current_stream
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.backends.devices.accelerator import DeviceAccelerator
from equipoise.hal.lock import StreamLock
from equipoise.hal.stream import Role

AHEAD, NODES, WORDS = 48, 24, 64
"""Replays that are launched before the first of them may go on, and launches in each."""
LAUNCHES = 500
"""Of a step without a graph, behind its lock."""


def feed(device: DeviceAccelerator, lock: StreamLock, slot: Tensor, rounds: int) -> None:
    """As a writer: bring number after number into the slot, each in a turn of its own."""
    copies, page = device.stream(Role.COPY), device.pinned(slot.nbytes).view(slot.dtype)
    for number in range(1, rounds + 1):
        page.fill_(number)
        copies.launch(partial(slot.copy_, page, non_blocking=True))
        copies.synchronize(WATCHDOG)
        lock.signal(0)
        lock.wait(0, WATCHDOG)


def zeros(device: DeviceAccelerator, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    tensor = torch.zeros(shape, dtype=dtype, device=device.device)
    current_stream(device).synchronize()
    return tensor


def test_copies_complete_while_replays_wait_for_lock(device: DeviceAccelerator) -> None:
    compute, lock, graph = device.stream(Role.COMPUTE), device.stream_lock(WATCHDOG), device.graph()
    slot, copies = zeros(device, WORDS), zeros(device, AHEAD, WORDS)
    place = zeros(device, 1, dtype=torch.int64)

    def step() -> None:
        lock.acquire(compute)
        compute.launch(lambda: copies.index_copy_(0, place, slot[None]))
        for _ in range(NODES):
            compute.launch(partial(place.add_, 0))
        compute.launch(partial(place.add_, 1))
        lock.release(compute)

    graph.capture(compute, step)
    with ThreadPoolExecutor(1) as pool:
        launched = pool.submit(lambda: [graph.replay(compute) for _ in range(AHEAD)])
        feed(device, lock, slot, AHEAD)
        launched.result(WATCHDOG)
    compute.synchronize(WATCHDOG)
    expected = torch.arange(1, AHEAD + 1, dtype=torch.int32)[:, None].expand(-1, WORDS)
    assert torch.equal(copies.cpu(), expected)
    assert lock.drain(WATCHDOG) == 1


def test_copy_completes_while_single_launches_wait_for_lock(
    device: DeviceAccelerator,
) -> None:
    """Fewer launches than a device's queue has room for: behind more of them the host stands."""
    compute, lock = device.stream(Role.COMPUTE), device.stream_lock(WATCHDOG)
    slot, target = zeros(device, WORDS), zeros(device, WORDS)
    lock.acquire(compute)
    compute.launch(lambda: target.copy_(slot))
    for _ in range(LAUNCHES):
        compute.launch(partial(target.add_, 1))
    lock.release(compute)
    feed(device, lock, slot, 1)
    compute.synchronize(WATCHDOG)
    assert target.tolist() == [1 + LAUNCHES] * WORDS
