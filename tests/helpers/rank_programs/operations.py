"""What happens to operations in flight."""

import os
import signal
import time
from functools import partial
from typing import Any

import torch
from helpers.rank_programs.call_outcome import Outcome, outcome
from helpers.watchdog import WATCHDOG

from equipoise.backends.cpu.gloo_work import GlooWork
from equipoise.hal.communicator import Communicator, Exchange, Fabric, PeerBuffer


def meet(fabric: Fabric, place: str) -> None:
    """Every rank has come here, by the control plane alone."""
    fabric.control.cast(place, b"")
    fabric.control.collect(place, WATCHDOG)


def total(group: Communicator) -> int:
    """A sum over ranks that shows whether the communicator works."""
    value = torch.tensor([1 + group.rank])
    group.all_reduce(value).result(WATCHDOG)
    return int(value)


def cancel_and_rebuild(fabric: Fabric) -> Any:
    """The deadline of a cancelled operation passes after the communicator was rebuilt."""
    group = fabric.open("cancelled")
    work = group.irecv(torch.zeros(5), 1 - group.rank)
    work.cancel()
    later = outcome(lambda: group.barrier())
    group.rebuild([0, 1])
    before = total(group)
    expiry = time.monotonic() + WATCHDOG
    assert isinstance(work, GlooWork)
    while work.buffers and time.monotonic() < expiry:  # gloo lets go of them at the deadline
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
        "exchange with oneself": lambda: group.exchange(
            Exchange((PeerBuffer(group.rank, blob),), ())
        ),
        "exchange with nobody": lambda: group.exchange(Exchange((), (PeerBuffer(9, blob),))),
        "exchange of floats": lambda: group.exchange(Exchange((PeerBuffer(1, flat),), ())),
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
    ends = [outcome(partial(work.result, WATCHDOG))["error"] for work in works]
    return {"closing": closing, "later": later, "ends": ends}


def lose_by_kill(fabric: Fabric, rank: int) -> Any:
    """One rank is killed while the others wait for it; they find out, and go on without it."""
    group = fabric.open("survivors")
    fabric.control.set_operation("the sum that rank 1 misses")
    meet(fabric, "all there")
    if fabric.control.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    sum_outcome = outcome(lambda: group.all_reduce(torch.ones(1)).result(WATCHDOG))
    loss = fabric.control.lost_rank(WATCHDOG)
    group.rebuild([other for other in range(fabric.control.size) if other != rank])
    return {
        "failed": sum_outcome,
        "lost": loss and [loss.rank, loss.reason, loss.operation],
        "place": [group.rank, group.size],
        "total": total(group),
    }
