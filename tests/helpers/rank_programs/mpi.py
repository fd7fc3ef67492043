"""What MPI does beside what every communicator does."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from helpers.rank_programs.call_outcome import outcome
from helpers.rank_programs.operations import meet, total
from helpers.watchdog import WATCHDOG

from equipoise.hal.communicator import Communicator, Fabric


def overlapping(fabric: Fabric) -> Any:
    """Three groups that share ranks, used in an order of each rank's own."""
    me, groups = fabric.control.rank, {"0123": [0, 1, 2, 3], "210": [2, 1, 0], "13": [1, 3]}
    communicators = {n: fabric.open(n, ranks) for n, ranks in groups.items() if me in ranks}
    values = {name: torch.tensor([10**me]) for name in communicators}
    ordered_names = sorted(communicators, reverse=me % 2 == 1)
    works = [communicators[name].all_reduce(values[name]) for name in ordered_names]
    for work in works:
        work.result(WATCHDOG)
    return {name: [communicators[name].rank, int(values[name])] for name in communicators}


def refusals(fabric: Fabric) -> Any:
    """Groups that cannot be."""
    me, size = fabric.control.rank, fabric.control.size
    fabric.open("once")
    return [
        outcome(lambda: fabric.open("once"))["error"],
        outcome(lambda: fabric.open("twice", [me, me]))["error"],
        outcome(lambda: fabric.open("without", [(me + 1) % size]))["error"],
        outcome(lambda: fabric.open("beyond", [me, size]))["error"],
    ]


def lonely(fabric: Fabric) -> Any:
    """Rank 1 never opens what rank 0 opens."""
    if fabric.control.rank == 0:
        answer = outcome(lambda: fabric.open("lonely"))
        meet(fabric, "alone")
        return answer
    meet(fabric, "alone")
    return None


def time_out_unmatched_operations(fabric: Fabric) -> None:
    """Rank 0 issues what nobody matches, each on a group of its own, and waits for the deadline."""
    receiving, sending, summing = (fabric.open(name) for name in ("receive", "send", "sum"))
    if fabric.control.rank == 0:
        works = (
            receiving.irecv(torch.ones(70000), 1),
            sending.isend(torch.ones(70000), 1),
            summing.all_reduce(torch.ones(70000)),
        )
        for work in works:
            assert outcome(partial(work.result, WATCHDOG))["error"] == "OperationTimeout"
    meet(fabric, "timed out")  # else rank 1 could leave before the deadline


def another_size(fabric: Fabric, sent: int, expected: int) -> Any:
    """A message that is longer or shorter than its receive."""
    group = fabric.open("sizes")
    if group.rank == 0:
        return outcome(lambda: group.isend(torch.zeros(sent), 1).result(WATCHDOG))
    return outcome(lambda: group.irecv(torch.zeros(expected), 0).result(WATCHDOG))


def misaligned(fabric: Fabric) -> Any:
    """Bytes and numbers at any offset, between guards."""
    group, right = fabric.open("misaligned"), []
    for offset in (0, 1, 2, 3, 4):
        storage = torch.full((8 * 1000 + 8,), 255, dtype=torch.uint8)
        bytes_ = storage[offset : offset + 1001].fill_(group.rank)
        group.broadcast(bytes_, 1).result(WATCHDOG)
        right.append(bytes_.eq(1).all().item() and storage[offset + 1001 :].eq(255).all().item())
        numbers = torch.frombuffer(storage.numpy(), dtype=torch.float64, offset=offset, count=1000)
        numbers.fill_(group.rank)
        group.all_reduce(numbers).result(WATCHDOG)
        summed = numbers.eq(group.size * (group.size - 1) / 2).all().item()
        right.append(summed and storage[offset + 8000 :].eq(255).all().item())
    return right


def from_threads(fabric: Fabric, rounds: int) -> Any:
    """Threads of every rank share one communicator for messages, and have one each for sums."""
    messages, sums = fabric.open("shared"), [fabric.open(f"sum {n}") for n in range(3)]
    me, size, wrong = messages.rank, messages.size, []

    def add(group: Communicator, seed: int) -> None:
        for number in range(rounds):
            value = torch.tensor([me + seed + number])
            group.all_reduce(value).result(WATCHDOG)
            expected = size * (seed + number) + size * (size - 1) // 2
            if int(value) != expected:
                wrong.append(f"sum {seed}/{number}: {int(value)}")

    def pass_on(group: Communicator, data: list[torch.Tensor]) -> None:
        works = [group.isend(item, (me + 1) % size) for item in data]
        arriving = [torch.zeros_like(item) for item in data]
        works += [group.irecv(item, (me - 1) % size) for item in arriving]
        for work in works:
            work.result(WATCHDOG)
        received.extend(int(item[0]) for item in arriving)

    received: list[int] = []
    data = [torch.full((n + 1,), n + 1) for n in range(rounds)]
    threads = [threading.Thread(target=add, args=(g, n)) for n, g in enumerate(sums)]
    threads += [threading.Thread(target=pass_on, args=(messages, data))]
    threads += [threading.Thread(target=_barriers, args=(messages, rounds, wrong))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WATCHDOG)
    return [wrong, received == list(range(1, rounds + 1)), [t.is_alive() for t in threads]]


def _barriers(group: Communicator, rounds: int, wrong: list[str]) -> None:
    for _ in range(rounds):
        error = outcome(lambda: group.barrier().result(WATCHDOG))["error"]
        if error:
            wrong.append(error)


def open_from_threads(fabric: Fabric) -> Any:
    """Two threads open communicators at once, in another order on every other rank."""
    barrier = threading.Barrier(2)

    def work(name: str) -> int:
        barrier.wait(WATCHDOG)
        return total(fabric.open(name))

    names = ["left", "right"] if fabric.control.rank % 2 else ["right", "left"]
    with ThreadPoolExecutor(2) as pool:
        totals = pool.map(work, names, timeout=WATCHDOG)
        return dict(zip(names, totals, strict=True))


def ring(fabric: Fabric, elements: int) -> Any:
    """Everybody sends, and only then receives."""
    group = fabric.open("ring")
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    arriving = torch.zeros(elements)
    sending = group.isend(torch.full((elements,), float(group.rank)), right)
    meet(fabric, "all sends")
    group.irecv(arriving, left).result(WATCHDOG)
    sending.result(WATCHDOG)
    return arriving.eq(left).all().item()


def reopen(fabric: Fabric, rounds: int) -> Any:
    """Communicators of one rank come and go; then one of all still works. What their meetings have
    left in the store comes last."""
    totals, me = set(), fabric.control.rank
    for number in range(rounds):
        group = fabric.open(f"round {number}", [me])
        totals.add(total(group))
        group.close()
    whole = total(fabric.open("all"))  # behind it all ranks are through with their rounds
    control: Any = fabric.control
    remaining_keys = [key for key in control.store.list_keys() if "/round " in key]
    return [sorted(totals), whole, len(remaining_keys)]


def left_behind(fabric: Fabric, rounds: int) -> Any:
    """Rank 1 never takes what rank 0 broadcast last, and then the communicator is closed."""
    values = []
    for number in range(rounds):
        unread, next_ = fabric.open(f"unread {number}"), torch.tensor([number])
        if unread.rank == 0:
            unread.broadcast(torch.tensor([-1]), 0).result(WATCHDOG)
        unread.close()
        total(fabric.open(f"meanwhile {number}"))
        group = fabric.open(f"next {number}")
        group.broadcast(next_, 0).result(WATCHDOG)
        values.append(int(next_))
        group.close()
    return values


def die(fabric: Fabric, rank: int) -> Any:
    """One rank is killed while the others wait for it."""
    group = fabric.open("dying")
    meet(fabric, "all there")
    if group.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier().result(WATCHDOG)


def process_id(fabric: Fabric) -> int:
    """Of this rank."""
    return os.getpid()
