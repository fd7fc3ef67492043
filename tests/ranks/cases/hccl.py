"""Programs of ranks whose tensors are on NPUs. The vendor is imported by whoever plays them."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from ranks.cases.outcomes import Outcome, outcome
from ranks.cases.patterns import SOON
from torch import Tensor, distributed

from equipoise.backends.ascend import BACKEND
from equipoise.backends.devices.collectives.ledger import LEDGER
from equipoise.hal.communicator import Communicator, Exchange, Fabric, Parcel
from equipoise.hal.stream import Role, Stream
from equipoise.hal.work import Work

SHORT = 0.05
Edge = Sequence[int]
"""(source, destination) of a message."""


def device(fabric: Fabric) -> Any:
    """This rank's device, opened, once everybody has opened theirs: a first one takes a while."""
    made = BACKEND.open(fabric.control.rank)
    put([0])
    meet(fabric, "devices")
    return made


def put(values: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor:
    """On the device that was opened."""
    return torch.tensor(list(values), dtype=dtype).to("npu")


def meet(fabric: Fabric, question: str) -> None:
    """Wait for the others, by the control plane alone."""
    fabric.control.cast(question, b"")
    fabric.control.collect(question, SOON)


def messages(fabric: Fabric, edges: Sequence[Edge], nbytes: int) -> list[list[int]]:
    """Everybody sends everything before it receives anything, in the order given; what came."""
    device(fabric)
    group = fabric.open("test")
    works, found = [], []
    for number, (source, destination) in enumerate(edges):
        if source == group.rank:
            works.append(group.isend(put([number] * nbytes), destination))
    for source, destination in edges:
        if destination == group.rank:
            found.append(put([255] * nbytes))
            works.append(group.irecv(found[-1], source))
    for work in works:
        work.result(SOON)
    return [tensor.tolist() for tensor in found]


def late(fabric: Fabric) -> dict[str, Any]:
    """Rank 0 issues its ends at once, rank 1 long after: what rank 0 sees meanwhile."""
    device(fabric)
    group = fabric.open("test")
    other, mine = 1 - group.rank, put([group.rank, 7])
    into = put([0, 0])
    if group.rank == 1:
        fabric.control.collect("issued", SOON, [0])
    works = [group.isend(mine, other), group.irecv(into, other)]
    seen = {"done": [work.done() for work in works] if group.rank == 0 else []}
    fabric.control.cast("issued", b"")
    for work in works:
        work.result(SOON)
    return {**seen, "came": into.tolist()}


def awaited(fabric: Fabric) -> list[int]:
    """A stream waits for a message whose link is not there yet, and for which nobody has come."""
    npu = device(fabric)
    group, stream = fabric.open("test"), npu.stream(Role.COMPUTE)
    into, seen = put([0, 0]), put([9, 9])
    if group.rank == 0:
        work = group.irecv(into, 1)
        work.wait(stream)
        stream.launch(lambda: seen.copy_(into))
        fabric.control.cast("waiting", b"")
    else:
        fabric.control.collect("waiting", SOON, [0])
        work = group.isend(put([5, 6]), 0)
    stream.synchronize(SOON)
    work.result(SOON)
    return seen.tolist()


def in_vain(fabric: Fabric) -> list[Any]:
    """A stream waits for a message that never comes: how the work and the stream end, and whether
    the device comes behind the wait."""
    npu = device(fabric)
    group, stream = fabric.open("test"), npu.stream(Role.COMPUTE)
    work = group.irecv(put([0, 0]), 1 - group.rank)
    work.wait(stream)
    ended = outcome(lambda: work.result(SOON))
    failed = outcome(lambda: _until_failed(stream))
    return [ended, failed, _until(lambda: bool(stream.native.query()))]


def _until_failed(stream: Stream) -> None:
    """The stream is told by another thread, right behind the end of the work."""
    expiry = time.monotonic() + SOON
    while time.monotonic() < expiry:
        stream.launch(lambda: None)
        time.sleep(SHORT)


def ordered(fabric: Fabric) -> list[Any]:
    """A first message is sent from a stream that a lock holds up before it writes what is sent."""
    npu = device(fabric)
    group, stream = fabric.open("test"), npu.stream(Role.COMPUTE)
    data, final = put([1, 1]), put([2, 3])
    meet(fabric, "open")
    if group.rank == 1:
        group.irecv(data, 0).result(SOON)
        return [True, data.tolist()]
    lock = npu.stream_lock(SOON)
    lock.acquire(stream)
    stream.launch(lambda: data.copy_(final))
    with stream.current():
        work = group.isend(data, 1)
    _until(lambda: len(LEDGER.held()) > 1)  # the link is there
    early = outcome(lambda: work.result(SHORT))["error"] == ""
    lock.signal(lock.epoch)
    work.result(SOON)
    return [not early, final.tolist()]


def warmed(fabric: Fabric) -> list[Any]:
    """Threads that a first message makes after its link was warmed, and what the ledger holds."""
    device(fabric)
    group = fabric.open("test")
    group.warm([(0, 1)])
    before = set(threading.enumerate())
    data = put([group.rank])
    work = group.isend(data, 1) if group.rank == 0 else group.irecv(data, 0)
    made = [thread.name for thread in set(threading.enumerate()) - before]
    work.result(SOON)
    names = [holding.name for holding in LEDGER.held()]
    return [made, data.tolist(), names]


def many(fabric: Fabric, count: int) -> list[Any]:
    """Open and close so many communicators, one after the other: the sums, and what is left."""
    device(fabric)
    found = []
    for number in range(count):
        group = fabric.open(f"c{number}")
        value = put([group.rank + number], torch.int32)
        group.all_reduce(value).result(SOON)
        found.append(value.item())
        meet(fabric, f"through with {number}")
        group.close()
    left = _until(lambda: not LEDGER.held())
    return [found, left]


def too_many(fabric: Fabric, count: int) -> list[Outcome]:
    """Open so many communicators and close none."""
    device(fabric)
    for number in range(count):
        fabric.open(f"c{number}")
    return [outcome(lambda: fabric.open("one more"))]


def surroundings(fabric: Fabric) -> dict[str, Any]:
    """What opening a communicator leaves behind in the process."""
    before = dict(os.environ)
    device(fabric)
    group = fabric.open("test")
    value = put([1], torch.int32)
    group.all_reduce(value).result(SOON)
    threads = {thread.name for thread in threading.enumerate()}
    return {
        "environment": before == dict(os.environ),
        "initialised": distributed.is_initialized(),
        "watchdogs": len([n for n in _native_threads() if n.startswith("hccl_watchdog")]),
        "ours": "equipoise.hccl" in threads,
    }


def empties(fabric: Fabric) -> list[Any]:
    """Empty operations are operations: they end when everybody has come, and not before."""
    device(fabric)
    group = fabric.open("test")
    nothing = put([])
    if group.rank == 1:
        fabric.control.collect("looked", SOON, [0])
    works: list[Work] = [group.broadcast(nothing, 0)]
    works.append(group.isend(nothing, 1) if group.rank == 0 else group.irecv(nothing, 0))
    seen = []
    if group.rank == 0:
        for work in works:
            seen.append(outcome(lambda work=work: work.result(SHORT)))  # type: ignore[misc]
        fabric.control.cast("looked", b"")
    for work in works:
        work.result(SOON)
    return seen


def mismatch(fabric: Fabric) -> list[Outcome]:
    """Ranks issue sums of different sizes: a fault of the program's, which the device notices."""
    device(fabric)
    group, sound = fabric.open("hit"), fabric.open("spared")
    with own_faults():
        work = group.all_reduce(put([1] * (1 + group.rank), torch.int32))
        ended = outcome(lambda: work.result(SOON))
        again = outcome(group.barrier)
        meet(fabric, "seen")
    sound.barrier().result(SOON)
    return [ended, again]


def captured(fabric: Fabric) -> list[Outcome]:
    """Operations inside a graph."""
    npu = device(fabric)
    group, graph, stream = fabric.open("test"), npu.graph(), npu.stream(Role.COMPUTE)
    data = put([1], torch.int32)
    meet(fabric, "open")

    def program() -> None:
        seen.append(outcome(lambda: group.all_reduce(data)))
        seen.append(outcome(lambda: group.isend(data, 1 - group.rank)))

    seen: list[Outcome] = []
    graph.capture(stream, lambda: stream.launch(program))
    group.barrier().result(SOON)
    return seen


def refused(fabric: Fabric) -> list[Outcome]:
    """Tensors that HCCL must not be given."""
    npu = device(fabric)
    group = fabric.open("test")
    private = npu.private((32, 32), torch.float16)
    calls: list[Callable[[], object]] = [
        lambda: group.broadcast(torch.zeros(4), 0),
        lambda: group.broadcast(private, 0),
        lambda: group.broadcast(torch.zeros(2).to(f"npu:{2 + group.rank}"), 0),
        lambda: group.all_reduce(put([1])),
        lambda: group.exchange(Exchange((Parcel(1 - group.rank, torch.zeros(2)),), ())),
    ]
    found = [outcome(call) for call in calls]
    group.barrier().result(SOON)
    return found


def lost_while_linking(fabric: Fabric) -> Any:
    """Rank 1 ends right behind its first message; rank 0 has asked for the other end."""
    device(fabric)
    group = fabric.open("test")
    meet(fabric, "open")
    before = set(threading.enumerate())
    data = put([1])
    if group.rank == 1:
        group.isend(data, 0)
        os._exit(1)
    work = group.irecv(data, 1)
    ended = outcome(lambda: work.result(SOON))
    gone = _until(lambda: not set(threading.enumerate()) - before)
    return [ended, gone]


def reopened(fabric: Fabric, rounds: int) -> list[int]:
    """An operation that nobody answers, then a rebuild, again and again."""
    device(fabric)
    group = fabric.open("test")
    found = []
    for number in range(rounds):
        work = group.all_reduce(put([0], torch.int32)) if group.rank == 0 else _silent(group)
        outcome(lambda work=work: work.result(SOON))  # type: ignore[misc]
        group.rebuild([0, 1])
        value = put([number + group.rank], torch.int32)
        group.all_reduce(value).result(SOON)
        found.append(int(value.item()))
    return found


def _silent(group: Communicator) -> Work:
    """Something else that fails, so that both ranks know."""
    return group.irecv(put([0]), 0)


def _until(ready: Callable[[], bool]) -> bool:
    expiry = time.monotonic() + SOON
    while not ready() and time.monotonic() < expiry:
        time.sleep(SHORT)
    return ready()


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
