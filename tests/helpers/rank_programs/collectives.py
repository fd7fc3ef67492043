"""Programs of collectives and point-to-point operations, each beside its definition."""

from collections.abc import Callable
from typing import Any

import torch
from helpers.rank_programs.patterns import SOON, empty, pattern, same
from torch import Tensor

from equipoise.hal.communicator import Communicator, Exchange, Fabric, Parcel
from equipoise.hal.work import Work

Step = dict[str, Any]
Check = Callable[[], None]
Issued = tuple[list[Work], Check]


def play(fabric: Fabric, program: list[Step], order: list[int]) -> int:
    """Issue everything, wait in the given order, and compare; returns how much was compared."""
    group = fabric.open("test")
    issued = [ISSUERS[step["op"]](group, seed, step) for seed, step in enumerate(program)]
    for place in order:
        for work in reversed(issued[place][0]):
            work.result(SOON)
            assert work.done()
    for _, check in issued:
        check()
    return len(issued)


def issue_all_reduce(group: Communicator, seed: int, step: Step) -> Issued:
    shape, dtype = step["shape"], step["dtype"]
    mine = pattern(seed, group.rank, shape, dtype)
    parts = [pattern(seed, rank, shape, dtype) for rank in range(group.size)]
    expected = torch.stack(parts).sum(0).to(mine.dtype)
    return [group.all_reduce(mine)], lambda: equal(mine, expected)


def issue_all_gather(group: Communicator, seed: int, step: Step) -> Issued:
    shape, dtype = step["shape"], step["dtype"]
    out = empty([group.size, *shape], dtype)
    parts = [pattern(seed, rank, shape, dtype) for rank in range(group.size)]
    work = group.all_gather(out, parts[group.rank].clone())
    return [work], lambda: each_equal(list(out), parts)


def issue_reduce_scatter(group: Communicator, seed: int, step: Step) -> Issued:
    shape, dtype = step["shape"], step["dtype"]
    wide = [group.size, *shape]
    parts = [pattern(seed, rank, wide, dtype) for rank in range(group.size)]
    out = empty(shape, dtype)
    expected = torch.stack(parts).sum(0).to(out.dtype)[group.rank]
    work = group.reduce_scatter(out, parts[group.rank].clone())
    return [work], lambda: equal(out, expected)


def issue_broadcast(group: Communicator, seed: int, step: Step) -> Issued:
    shape, dtype = step["shape"], step["dtype"]
    source = step["source"] % group.size
    mine = pattern(seed, group.rank, shape, dtype)
    work = group.broadcast(mine, source)
    return [work], lambda: equal(mine, pattern(seed, source, shape, dtype))


def issue_all_to_all(group: Communicator, seed: int, step: Step) -> Issued:
    shape, dtype = [group.size, *step["shape"]], step["dtype"]
    out = empty(shape, dtype)
    work = group.all_to_all(out, pattern(seed, group.rank, shape, dtype))
    parts = [pattern(seed, rank, shape, dtype)[group.rank] for rank in range(group.size)]
    return [work], lambda: each_equal(list(out), parts)


def issue_uneven(group: Communicator, seed: int, step: Step) -> Issued:
    rows, width, dtype = step["rows"], step["width"], step["dtype"]
    me = group.rank
    sends = [rows[me][peer] for peer in range(group.size)]
    receives = [rows[peer][me] for peer in range(group.size)]
    out = empty([sum(receives), *width], dtype)
    mine = pattern(seed, me, [sum(sends), *width], dtype)
    parts = []
    for peer in range(group.size):
        theirs = rows[peer][: group.size]
        whole = pattern(seed, peer, [sum(theirs), *width], dtype)
        parts.append(whole[sum(theirs[:me]) : sum(theirs[: me + 1])])
    work = group.all_to_all_uneven(out, mine, receives, sends)
    return [work], lambda: each_equal(list(torch.split(out, receives)), parts)


def issue_barrier(group: Communicator, seed: int, step: Step) -> Issued:
    return [group.barrier()], lambda: None


def issue_exchange(group: Communicator, seed: int, step: Step) -> Issued:
    """A round of blobs; bands of guard bytes around what is received."""
    rows, me = step["rows"], group.rank
    peers = [peer for peer in range(group.size) if peer != me]
    sends = tuple(Parcel(p, blob(seed, me, p, rows[me][p])) for p in peers)
    storages = {p: torch.full((rows[p][me] + 8,), 255, dtype=torch.uint8) for p in peers}
    receives = tuple(Parcel(p, storages[p][4:-4]) for p in peers)
    work = group.exchange(Exchange(sends=sends, receives=receives))

    def check() -> None:
        for peer, storage in storages.items():
            equal(storage[4:-4], blob(seed, peer, me, rows[peer][me]))
            assert storage[:4].tolist() + storage[-4:].tolist() == [255] * 8

    return [work], check


def issue_messages(group: Communicator, seed: int, step: Step) -> Issued:
    """Several messages a pair, sends first, what was sent dropped and overwritten at once."""
    me, works, arriving = group.rank, [], []
    messages = [(a % group.size, b % group.size, n) for a, b, n in step["messages"]]
    for number, (source, destination, size) in enumerate(messages):
        if source == me != destination:
            works.append(
                group.isend(blob(seed + 50 * number, source, destination, size), destination)
            )
            scribble(size)
    for number, (source, destination, size) in enumerate(messages):
        if destination == me != source:
            storage = torch.full((size + 8,), 255, dtype=torch.uint8)
            works.append(group.irecv(storage[4:-4], source))
            arriving.append((storage, blob(seed + 50 * number, source, destination, size)))

    def check() -> None:
        for storage, expected in arriving:
            equal(storage[4:-4], expected)
            assert storage[:4].tolist() + storage[-4:].tolist() == [255] * 8

    return works, check


def blob(seed: int, source: int, destination: int, size: int) -> Tensor:
    return pattern(seed, 16 * source + destination, [size], "uint8")


def scribble(size: int) -> None:
    """Take the memory that was just given back, and fill it."""
    for _ in range(4):
        torch.full((size,), 255, dtype=torch.uint8)


def equal(found: Tensor, expected: Tensor) -> None:
    assert same(found, expected), f"expected {expected}, got {found}"


def each_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        equal(one, other)


ISSUERS: dict[str, Callable[[Communicator, int, Step], Issued]] = {
    "all_reduce": issue_all_reduce,
    "all_gather": issue_all_gather,
    "reduce_scatter": issue_reduce_scatter,
    "broadcast": issue_broadcast,
    "all_to_all": issue_all_to_all,
    "uneven": issue_uneven,
    "barrier": issue_barrier,
    "exchange": issue_exchange,
    "messages": issue_messages,
}
