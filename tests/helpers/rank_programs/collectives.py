"""Programs of collectives and rounds, each beside its definition."""

from collections.abc import Callable
from typing import Any

import torch
from helpers.rank_programs.tensor_patterns import empty, pattern, same
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.hal.communicator import Communicator, Exchange, Fabric, PeerBuffer
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
            work.result(WATCHDOG)
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


def issue_exchange(group: Communicator, seed: int, step: Step) -> Issued:
    """A round of blobs; bands of guard bytes around what is received."""
    rows, me = step["rows"], group.rank
    peers = [peer for peer in range(group.size) if peer != me]
    sends = tuple(PeerBuffer(p, blob(seed, me, p, rows[me][p])) for p in peers)
    storages = {p: torch.full((rows[p][me] + 8,), 255, dtype=torch.uint8) for p in peers}
    receives = tuple(PeerBuffer(p, storages[p][4:-4]) for p in peers)
    work = group.exchange(Exchange(sends=sends, receives=receives))

    def check() -> None:
        for peer, storage in storages.items():
            equal(storage[4:-4], blob(seed, peer, me, rows[peer][me]))
            assert storage[:4].tolist() + storage[-4:].tolist() == [255] * 8

    return [work], check


def blob(seed: int, source: int, destination: int, size: int) -> Tensor:
    return pattern(seed, 16 * source + destination, [size], "uint8")


def equal(actual: Tensor, expected: Tensor) -> None:
    assert same(actual, expected), f"expected {expected}, got {actual}"


def each_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        equal(one, other)


ISSUERS: dict[str, Callable[[Communicator, int, Step], Issued]] = {
    "all_reduce": issue_all_reduce,
    "uneven": issue_uneven,
    "exchange": issue_exchange,
}
