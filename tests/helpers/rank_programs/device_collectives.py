"""Programs of ranks whose tensors are on devices, over any vendor's library.

The vendor is imported by whoever plays them.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.rank_programs.call_outcome import Outcome, outcome
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.backends.devices.collectives import comm_set
from equipoise.backends.devices.collectives.ccl import CclComm, CclHandle, WarmupOps
from equipoise.backends.devices.collectives.comm_init import warm_up_group
from equipoise.backends.devices.collectives.comm_memory import COMM_MEMORY
from equipoise.backends.devices.collectives.teardown import UNRELEASED_COMMS
from equipoise.hal import registry
from equipoise.hal.communicator import Communicator, Fabric
from equipoise.hal.stream import Role, Stream
from equipoise.hal.work import Work

SHORT = 0.05
Edge = Sequence[int]
"""(source, destination) of a message."""
_here: list[torch.device] = []
"""The device that was opened last."""


def device(fabric: Fabric, backend: str) -> Any:
    """This rank's device, opened, once everybody has opened theirs: a first one takes a while."""
    accelerator: Any = registry.accelerator(backend).open(fabric.control.rank)
    _here.append(accelerator.device)
    to_device([0])
    meet(fabric, "devices")
    return accelerator


def to_device(values: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor:
    """On the device that was opened."""
    return torch.tensor(list(values), dtype=dtype).to(_here[-1])


def meet(fabric: Fabric, question: str) -> None:
    """Wait for the others, by the control plane alone."""
    fabric.control.cast(question, b"")
    fabric.control.collect(question, WATCHDOG)


def messages(fabric: Fabric, backend: str, edges: Sequence[Edge], nbytes: int) -> list[list[int]]:
    """Everybody sends everything before it receives anything, in the order given; what came."""
    device(fabric, backend)
    group = fabric.open("test")
    works, received = [], []
    for number, (source, destination) in enumerate(edges):
        if source == group.rank:
            works.append(group.isend(to_device([number] * nbytes), destination))
    for source, destination in edges:
        if destination == group.rank:
            received.append(to_device([255] * nbytes))
            works.append(group.irecv(received[-1], source))
    for work in works:
        work.result(WATCHDOG)
    return [tensor.tolist() for tensor in received]


def late(fabric: Fabric, backend: str) -> dict[str, Any]:
    """Rank 0 issues its ends at once, rank 1 long after: what rank 0 sees meanwhile."""
    device(fabric, backend)
    group = fabric.open("test")
    other, mine = 1 - group.rank, to_device([group.rank, 7])
    into = to_device([0, 0])
    if group.rank == 1:
        fabric.control.collect("issued", WATCHDOG, [0])
    works = [group.isend(mine, other), group.irecv(into, other)]
    outcomes = {"done": [work.done() for work in works] if group.rank == 0 else []}
    fabric.control.cast("issued", b"")
    for work in works:
        work.result(WATCHDOG)
    return {**outcomes, "came": into.tolist()}


def awaited(fabric: Fabric, backend: str) -> list[int]:
    """A stream waits for a message whose link is not there yet, and for which nobody has come."""
    npu = device(fabric, backend)
    group, stream = fabric.open("test"), npu.stream(Role.COMPUTE)
    into, copied = to_device([0, 0]), to_device([9, 9])
    if group.rank == 0:
        work = group.irecv(into, 1)
        work.wait(stream)
        stream.launch(lambda: copied.copy_(into))
        fabric.control.cast("waiting", b"")
    else:
        fabric.control.collect("waiting", WATCHDOG, [0])
        work = group.isend(to_device([5, 6]), 0)
    stream.synchronize(WATCHDOG)
    work.result(WATCHDOG)
    return copied.tolist()


def in_vain(fabric: Fabric, backend: str) -> list[Any]:
    """A stream waits for a message that never comes: how the work and the stream end, and whether
    the device comes behind the wait."""
    npu = device(fabric, backend)
    group, stream = fabric.open("test"), npu.stream(Role.COMPUTE)
    work = group.irecv(to_device([0, 0]), 1 - group.rank)
    work.wait(stream)
    work_outcome = outcome(lambda: work.result(WATCHDOG))
    stream_outcome = outcome(lambda: _until_failed(stream))
    return [work_outcome, stream_outcome, until(lambda: bool(stream.native_stream.query()))]


def opened_after_slow_greeting(fabric: Fabric, backend: str) -> list[Any]:
    """Rank 1 issues the first operations of a communicator after its deadline: how opening that one
    ends, a sum over the next one, which both ranks open meanwhile, and which greetings followed
    each other on this rank."""
    device(fabric, backend)
    resumed, order = threading.Event(), list[str]()

    def greet(group: CclComm, *rest: Any) -> WarmupOps:
        order.append("begins")
        paused: Any = _PausedGroup(group, resumed)
        greeting = warm_up_group(paused, *rest)
        order.append("ends")
        return greeting

    if fabric.control.rank == 0:
        resumed.set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm_set, "warm_up_group", greet)
        slow_outcome = outcome(lambda: fabric.open("slow"))
        threading.Timer(10 * SHORT, resumed.set).start()  # after the next one could have begun
        group = fabric.open("next")
    total = to_device([1], torch.int32)
    group.all_reduce(total).result(WATCHDOG)
    return [slow_outcome, total.item(), order]


class _PausedGroup:
    """A group whose second operation waits until it is resumed."""

    def __init__(self, group: CclComm, resumed: threading.Event) -> None:
        self._group = group
        self._resumed = resumed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> CclHandle:
        assert self._resumed.wait(WATCHDOG)
        return self._group.reduce_scatter(out, tensor)


def _until_failed(stream: Stream) -> None:
    """The stream is told by another thread, right behind the end of the work."""
    expiry = time.monotonic() + WATCHDOG
    while time.monotonic() < expiry:
        stream.launch(lambda: None)
        time.sleep(SHORT)


def ordered(fabric: Fabric, backend: str) -> list[Any]:
    """A first message is sent from a stream that a lock holds up before it writes what is sent."""
    npu = device(fabric, backend)
    group, stream = fabric.open("test"), npu.stream(Role.COMPUTE)
    data, final = to_device([1, 1]), to_device([2, 3])
    meet(fabric, "open")
    if group.rank == 1:
        group.irecv(data, 0).result(WATCHDOG)
        return [True, data.tolist()]
    lock = npu.stream_lock(WATCHDOG)
    lock.acquire(stream)
    stream.launch(lambda: data.copy_(final))
    with stream.current():
        work = group.isend(data, 1)
    until(lambda: len(COMM_MEMORY.entries()) > 1)  # the link is there
    early = outcome(lambda: work.result(SHORT))["error"] == ""
    lock.signal(lock.epoch)
    work.result(WATCHDOG)
    return [not early, final.tolist()]


def warmed(fabric: Fabric, backend: str) -> list[Any]:
    """Threads that a first message over a warmed link makes, and the memory that is counted."""
    device(fabric, backend)
    group = fabric.open("test")
    group.warm([(0, 1)])
    before = set(threading.enumerate())
    data = to_device([group.rank])
    work = group.isend(data, 1) if group.rank == 0 else group.irecv(data, 0)
    new_threads = [thread.name for thread in set(threading.enumerate()) - before]
    work.result(WATCHDOG)
    names = [holding.name for holding in COMM_MEMORY.entries()]
    return [new_threads, data.tolist(), names]


def many(fabric: Fabric, backend: str, count: int) -> list[Any]:
    """Open and close so many communicators, one after the other: the sums, and what is left."""
    device(fabric, backend)
    sums = []
    for number in range(count):
        group = fabric.open(f"c{number}")
        value = to_device([group.rank + number], torch.int32)
        group.all_reduce(value).result(WATCHDOG)
        sums.append(value.item())
        meet(fabric, f"through with {number}")
        group.close()
    all_returned = until(lambda: not COMM_MEMORY.entries())
    return [sums, all_returned]


def empties(fabric: Fabric, backend: str) -> list[Any]:
    """Empty operations are operations: they end when everybody has come, and not before."""
    device(fabric, backend)
    group = fabric.open("test")
    nothing = to_device([])
    if group.rank == 1:
        fabric.control.collect("looked", WATCHDOG, [0])
    works: list[Work] = [group.broadcast(nothing, 0)]
    works.append(group.isend(nothing, 1) if group.rank == 0 else group.irecv(nothing, 0))
    outcomes = []
    if group.rank == 0:
        for work in works:
            outcomes.append(outcome(lambda work=work: work.result(SHORT)))  # type: ignore[misc]
        fabric.control.cast("looked", b"")
    for work in works:
        work.result(WATCHDOG)
    return outcomes


def captured(fabric: Fabric, backend: str) -> list[Outcome]:
    """Operations inside a graph."""
    npu = device(fabric, backend)
    group, graph, stream = fabric.open("test"), npu.graph(), npu.stream(Role.COMPUTE)
    data = to_device([1], torch.int32)
    meet(fabric, "open")

    def program() -> None:
        outcomes.append(outcome(lambda: group.all_reduce(data)))
        outcomes.append(outcome(lambda: group.isend(data, 1 - group.rank)))

    outcomes: list[Outcome] = []
    graph.capture(stream, lambda: stream.launch(program))
    group.barrier().result(WATCHDOG)
    return outcomes


def lost_while_linking(fabric: Fabric, backend: str) -> Any:
    """Rank 1 ends right behind its first message; rank 0 has asked for the other end."""
    device(fabric, backend)
    group = fabric.open("test")
    meet(fabric, "open")
    before = set(threading.enumerate())
    data = to_device([1])
    if group.rank == 1:
        group.isend(data, 0)
        os._exit(1)
    work = group.irecv(data, 1)
    work_outcome = outcome(lambda: work.result(WATCHDOG))
    threads_ended = until(lambda: not set(threading.enumerate()) - before)
    return [work_outcome, threads_ended]


def reopened(fabric: Fabric, backend: str, rounds: int) -> list[int]:
    """An operation that nobody answers, then a rebuild, again and again."""
    device(fabric, backend)
    group = fabric.open("test")
    sums = []
    for number in range(rounds):
        work = group.all_reduce(to_device([0], torch.int32)) if group.rank == 0 else _silent(group)
        outcome(lambda work=work: work.result(WATCHDOG))  # type: ignore[misc]
        group.rebuild([0, 1])
        value = to_device([number + group.rank], torch.int32)
        group.all_reduce(value).result(WATCHDOG)
        sums.append(int(value.item()))
    return sums


def aborted(fabric: Fabric, backend: str) -> list[Any]:
    """A stream waits for a message that nobody sends, over a link that is there; then an abort.

    How the work ends, what the stream says and whether the device comes behind it,
    what the communicator says; the sum after a rebuild, and whether all of the old one was given
    back.
    """
    npu = device(fabric, backend)
    group, stream = fabric.open("test"), npu.stream(Role.COMPUTE)
    group.warm([(0, 1)])
    work = group.irecv(to_device([0, 0]), 1 - group.rank)
    work.wait(stream)
    group.abort()
    work_outcome = outcome(lambda: work.result(WATCHDOG))
    stream_outcome = outcome(lambda: stream.launch(lambda: None))
    idle = until(lambda: bool(stream.native_stream.query()))
    refusal = outcome(group.barrier)
    group.rebuild([0, 1])
    value = to_device([group.rank], torch.int32)
    group.all_reduce(value).result(WATCHDOG)
    old_returned = until(lambda: len(COMM_MEMORY.entries()) == 1)
    return [work_outcome, stream_outcome, idle, refusal, value.item(), old_returned]


def closed_in_flight(fabric: Fabric, backend: str) -> list[Any]:
    """A message that nobody sends, and the fabric closes: what is kept, and what is still held."""
    device(fabric, backend)
    group = fabric.open("closing")
    group.warm([(0, 1)])
    work = group.irecv(to_device([0]), 1 - group.rank)
    meet(fabric, "issued")
    fabric.close()
    work_outcome = outcome(lambda: work.result(WATCHDOG))
    names = [*UNRELEASED_COMMS.names(), *(holding.name for holding in COMM_MEMORY.entries())]
    return [work_outcome, [name for name in names if name.startswith("closing")]]


def _silent(group: Communicator) -> Work:
    """Something else that fails, so that both ranks know."""
    return group.irecv(to_device([0]), 0)


def until(ready: Callable[[], bool]) -> bool:
    expiry = time.monotonic() + WATCHDOG
    while not ready() and time.monotonic() < expiry:
        time.sleep(SHORT)
    return ready()
