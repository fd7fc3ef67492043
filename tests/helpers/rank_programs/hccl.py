"""Programs of ranks that try what only HCCL and torch_npu do. Whoever plays them imports those."""

import os
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from helpers.rank_programs.call_outcome import Outcome, outcome
from helpers.rank_programs.device_collectives import device, meet, to_device
from helpers.watchdog import WATCHDOG
from torch import distributed

from equipoise.hal.communicator import Exchange, Fabric, PeerBuffer


def too_many(fabric: Fabric, backend: str, count: int) -> list[Outcome]:
    """Open so many communicators and close none."""
    device(fabric, backend)
    for number in range(count):
        fabric.open(f"c{number}")
    return [outcome(lambda: fabric.open("one more"))]


def surroundings(fabric: Fabric, backend: str) -> dict[str, Any]:
    """What opening a communicator leaves behind in the process."""
    before = dict(os.environ)
    device(fabric, backend)
    group = fabric.open("test")
    value = to_device([1], torch.int32)
    group.all_reduce(value).result(WATCHDOG)
    threads = {thread.name for thread in threading.enumerate()}
    return {
        "environment": before == dict(os.environ),
        "initialised": distributed.is_initialized(),
        "watchdogs": len([n for n in _native_threads() if n.startswith("hccl_watchdog")]),
        "ours": "equipoise.hccl" in threads,
    }


def mismatch(fabric: Fabric, backend: str) -> list[Outcome]:
    """Ranks issue sums of different sizes: a fault of the program's, which the device notices."""
    device(fabric, backend)
    group, sound = fabric.open("hit"), fabric.open("spared")
    with own_faults():
        work = group.all_reduce(to_device([1] * (1 + group.rank), torch.int32))
        first_outcome = outcome(lambda: work.result(WATCHDOG))
        second_outcome = outcome(group.barrier)
        meet(fabric, "seen")
    sound.barrier().result(WATCHDOG)
    return [first_outcome, second_outcome]


def refused(fabric: Fabric, backend: str) -> list[Outcome]:
    """Tensors that HCCL must not be given."""
    npu = device(fabric, backend)
    group = fabric.open("test")
    private = npu.empty_private((32, 32), torch.float16)
    calls: list[Callable[[], object]] = [
        lambda: group.broadcast(torch.zeros(4), 0),
        lambda: group.broadcast(private, 0),
        lambda: group.broadcast(torch.zeros(2).to(f"npu:{2 + group.rank}"), 0),
        lambda: group.all_reduce(to_device([1])),
        lambda: group.exchange(Exchange((PeerBuffer(1 - group.rank, torch.zeros(2)),), ())),
    ]
    outcomes = [outcome(call) for call in calls]
    group.barrier().result(WATCHDOG)
    return outcomes


def _native_threads() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm", encoding="utf-8") as file:
            names.append(file.read().strip())
    return names


@contextmanager
def own_faults() -> Any:
    """What the driver is told here is meant to happen."""
    before = os.environ.get("NPUSIM_FAULTS")
    os.environ["NPUSIM_FAULTS"] = os.devnull
    try:
        yield
    finally:
        if before is None:
            del os.environ["NPUSIM_FAULTS"]
        else:
            os.environ["NPUSIM_FAULTS"] = before
