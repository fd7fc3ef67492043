"""What happens to operations in flight."""

import gc
import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from helpers.rank_programs.outcomes import Outcome, outcome
from helpers.rank_programs.patterns import SOON

from equipoise.backends.cpu import BACKEND
from equipoise.hal.communicator import Communicator, Exchange, Fabric, Parcel
from equipoise.hal.stream import Role


def meet(fabric: Fabric, place: str) -> None:
    """Every rank has come here, by the control plane alone."""
    fabric.control.cast(place, b"")
    fabric.control.collect(place, SOON)


def total(group: Communicator) -> int:
    """A sum over ranks that shows whether the communicator works."""
    value = torch.tensor([1 + group.rank])
    group.all_reduce(value).result(SOON)
    return int(value)


def soft_then_late(fabric: Fabric) -> Any:
    """Rank 0 gives up twice before rank 1 sends at all."""
    group = fabric.open("soft")
    if fabric.control.rank == 1:
        meet(fabric, "pending")
        group.isend(torch.arange(5), 0).result(SOON)
        return total(group)
    data = torch.zeros(5, dtype=torch.int64)
    work = group.irecv(data, 1)
    early = [outcome(lambda: work.result(0.0))["error"]]
    early += [outcome(lambda: work.result(0.05))["error"], str(work.done())]
    meet(fabric, "pending")
    with ThreadPoolExecutor(4) as pool:
        for end in [pool.submit(work.result, SOON) for _ in range(4)]:
            end.result(SOON)
    again = [outcome(lambda: work.result(0.0))["error"] for _ in range(2)]
    return {
        "early": early,
        "again": again,
        "done": work.done(),
        "data": data.tolist(),
        "total": total(group),
    }


def soft_collective(fabric: Fabric) -> Any:
    """The same with a collective that rank 1 joins late."""
    group = fabric.open("soft")
    if fabric.control.rank == 1:
        meet(fabric, "pending")
        return total(group)
    value = torch.tensor([1])
    work = group.all_reduce(value)
    early = [outcome(lambda: work.result(0.05))["error"], str(work.done())]
    meet(fabric, "pending")
    work.result(SOON)
    return [*early, int(value)]


def wait_on_stream(fabric: Fabric) -> Any:
    """What is launched behind a wait sees what arrived; the host does not wait."""
    group, seen = fabric.open("stream"), []
    if fabric.control.rank == 1:
        meet(fabric, "launched")
        group.isend(torch.tensor([42]), 0).result(SOON)
        return None
    accelerator = BACKEND.open(0)
    stream = accelerator.stream(Role.COMPUTE)
    data = torch.zeros(1, dtype=torch.int64)
    work = group.irecv(data, 1)
    work.wait(stream)
    stream.launch(lambda: seen.append(int(data)))
    before = list(seen)
    meet(fabric, "launched")
    stream.synchronize(SOON)
    accelerator.close()
    return {"before": before, "seen": seen, "done": work.done()}


def unmatched(fabric: Fabric) -> Any:
    """Rank 0 waits for a message that nobody sends."""
    broken, sound = fabric.open("broken"), fabric.open("sound")
    answer: dict[str, Any] = {}
    if fabric.control.rank == 0:
        data = torch.zeros(5)
        work = broken.irecv(data, 1)
        answer["first"] = outcome(lambda: work.result(SOON))
        answer["again"] = outcome(lambda: work.result(SOON))
        answer["done"] = work.done()
        meet(fabric, "timed out")
    else:
        meet(
            fabric, "timed out"
        )  # else its own failure could end rank 0's wait before the deadline
        answer["first"] = outcome(lambda: broken.all_reduce(torch.ones(1)).result(SOON))
    answer["later"] = outcome(lambda: broken.barrier())
    answer["sound"] = total(sound)
    broken.rebuild([0, 1])
    answer["rebuilt"] = total(broken)
    return answer


def cancel_and_rebuild(fabric: Fabric) -> Any:
    """The deadline of a cancelled operation passes after the communicator was rebuilt."""
    group = fabric.open("cancelled")
    work = group.irecv(torch.zeros(5), 1 - group.rank)
    work.cancel()
    later = outcome(lambda: group.barrier())
    group.rebuild([0, 1])
    before = total(group)
    expiry = time.monotonic() + SOON
    while not work.done() and time.monotonic() < expiry:
        time.sleep(0.02)
    meet(fabric, "expired")
    return {"later": later, "before": before, "ended": work.done(), "after": total(group)}


def bad_calls(fabric: Fabric) -> list[Outcome]:
    """Every call that cannot be carried out; on rank 0 only, so nobody else would match it."""
    group = fabric.open("bad")
    f, wide = torch.zeros(2, 3), torch.zeros(group.size, 3)
    flat, blob = torch.zeros(4), torch.zeros(4, dtype=torch.uint8)
    calls = {
        "complex": lambda: group.broadcast(torch.zeros(1, dtype=torch.complex64), 0),
        "strided": lambda: group.all_reduce(f.t()),
        "sum of booleans": lambda: group.all_reduce(torch.zeros(1, dtype=torch.bool)),
        "sum of halves": lambda: group.reduce_scatter(wide[0].half(), wide.half()),
        "gather shape": lambda: group.all_gather(torch.zeros(group.size, 4), torch.zeros(3)),
        "gather dtype": lambda: group.all_gather(wide.int(), torch.zeros(3)),
        "scatter shape": lambda: group.reduce_scatter(torch.zeros(2), wide),
        "scatter dtype": lambda: group.reduce_scatter(wide[0].double(), wide),
        "even blocks": lambda: group.all_to_all(torch.zeros(5, 1), torch.zeros(5, 1)),
        "even scalar": lambda: group.all_to_all(torch.zeros(()), torch.zeros(())),
        "even dtype": lambda: group.all_to_all(wide.int(), wide),
        "uneven sums": lambda: group.all_to_all_uneven(flat, flat, [1, 1], [4, 0]),
        "uneven dtype": lambda: group.all_to_all_uneven(flat.int(), flat, [4, 0], [4, 0]),
        "uneven length": lambda: group.all_to_all_uneven(flat, flat, [4], [4]),
        "uneven negative": lambda: group.all_to_all_uneven(flat, flat, [5, -1], [5, -1]),
        "broadcast from nobody": lambda: group.broadcast(flat, group.size),
        "send to nobody": lambda: group.isend(flat, group.size),
        "send to oneself": lambda: group.isend(flat, group.rank),
        "receive from nobody": lambda: group.irecv(flat, -1),
        "exchange with oneself": lambda: group.exchange(Exchange((Parcel(group.rank, blob),), ())),
        "exchange with nobody": lambda: group.exchange(Exchange((), (Parcel(9, blob),))),
        "exchange of floats": lambda: group.exchange(Exchange((Parcel(1, flat),), ())),
        "abort": group.abort,
        "rebuild without oneself": lambda: group.rebuild([1]),
    }
    answers = []
    if group.rank == 0:
        answers = [{"call": name, **outcome(call)} for name, call in calls.items()]
    assert total(group) == group.size * (group.size + 1) // 2
    return answers


def close_in_flight(fabric: Fabric) -> Any:
    """Close with a receive and a barrier that nobody will match."""
    group = fabric.open("closing")
    if group.rank == 1:
        return None
    works = [group.irecv(torch.zeros(5), 1), group.barrier()]
    closing = outcome(group.close)
    later = outcome(lambda: group.barrier())
    ends = [outcome(partial(work.result, SOON))["error"] for work in works]
    return {"closing": closing, "later": later, "ends": ends, "threads": gone("closing")}


def gone(word: str) -> bool:
    """Whether within a while no thread is left whose name has `word` in it."""
    expiry = time.monotonic() + SOON
    while any(word in thread.name for thread in threading.enumerate()):
        if time.monotonic() > expiry:
            return False
        time.sleep(0.01)
    return True


def fewest(word: str, at_most: int) -> int:
    """How many threads with `word` in their names are left, once few enough are, or in a while."""
    expiry = time.monotonic() + SOON
    while True:
        left = sum(word in thread.name for thread in threading.enumerate())
        if left <= at_most or time.monotonic() > expiry:
            return left
        time.sleep(0.01)


def drop_everything(fabric: Fabric, rounds: int) -> Any:
    """Send and receive without keeping anything; what is left afterwards."""
    group = fabric.open("dropped")
    buffers = []
    for number in range(rounds):
        peer = 1 - group.rank
        data, into = torch.full((999,), float(number)), torch.zeros(999)
        group.isend(data, peer)
        group.irecv(into, peer)
        group.all_reduce(summed := torch.ones(7))
        buffers += [weakref.ref(tensor) for tensor in (data, into, summed)]
        del data, into, summed
    for _ in range(6):
        total(group)
    gc.collect()
    threads = fewest("dropped", at_most=2)
    alive = sum(ref() is not None for ref in buffers)
    group.close()
    return {"threads": threads, "alive": alive, "gone": gone("dropped")}


def lose_by_kill(fabric: Fabric, rank: int) -> Any:
    """One rank is killed while the others wait for it; they find out, and go on without it."""
    group = fabric.open("survivors")
    fabric.control.enter("the sum that rank 1 misses")
    meet(fabric, "all there")
    if fabric.control.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    failed = outcome(lambda: group.all_reduce(torch.ones(1)).result(SOON))
    lost = fabric.control.lost(SOON)
    group.rebuild([other for other in range(fabric.control.size) if other != rank])
    return {
        "failed": failed,
        "lost": lost and [lost.rank, lost.how, lost.operation],
        "place": [group.rank, group.size],
        "total": total(group),
    }


def lose_by_stop(fabric: Fabric, rank: int) -> Any:
    """One rank is stopped; the others name it by its silence, and nobody before."""
    fabric.control.enter("a step")
    meet(fabric, "all there")
    early = fabric.control.lost(0.3)
    meet(fabric, "nobody accused")
    if fabric.control.rank == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    lost = fabric.control.lost(SOON)
    return {
        "early": early and str(early),
        "lost": lost and [lost.rank, lost.how, lost.operation],
    }
