"""Checked mode, with ranks as threads over gloo: clauses C7, P1, P2, P6, K3."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.processes.thread_ranks import GroupMember, on_ranks
from helpers.watchdog import WATCHDOG

from equipoise.hal.checked_communicator import CheckedCommunicator
from equipoise.hal.communicator import Communicator, Exchange, PeerBuffer
from equipoise.hal.errors import (
    BallotIncomplete,
    CommunicatorFailed,
    OrderMismatch,
    ResultPending,
    Unsupported,
)
from equipoise.hal.work import Work


def open_checked(
    member: GroupMember,
    purpose: str = "test",
    ranks: Sequence[int] | None = None,
    deadline: float = WATCHDOG,
) -> CheckedCommunicator:
    inner = member.fabric.open(purpose, ranks)
    return CheckedCommunicator(inner, member.fabric.control, 0, deadline, ranks)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def blob(size: int, value: int = 0) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def total(group: Communicator) -> int:
    value = ints(group.rank + 1)
    group.all_reduce(value).result(WATCHDOG)
    return int(value)


def run_every_operation(group: CheckedCommunicator) -> list[object]:
    """One of each operation, on two ranks."""
    me, peer = group.rank, 1 - group.rank
    gathered, part, even = torch.zeros(2, 1).long(), ints(0), torch.zeros(2, 1).long()
    root, uneven = ints(me + 5), torch.zeros(1 + me).long()
    received_blob = blob(3)
    group.warm([(0, 1)])
    group.barrier().result(WATCHDOG)
    group.all_gather(gathered, ints(me)).result(WATCHDOG)
    group.reduce_scatter(part, ints(1, 2).view(2, 1)).result(WATCHDOG)
    group.broadcast(root, 1).result(WATCHDOG)
    group.all_to_all(even, ints(me, me + 2).view(2, 1)).result(WATCHDOG)
    rows = ints(me, me)[: 1 + me]
    sends, receives = ([0, 1], [0, 1]) if me == 0 else ([1, 1], [1, 1])
    group.all_to_all_uneven(uneven, rows, receives, sends).result(WATCHDOG)
    group.exchange(
        Exchange((PeerBuffer(peer, blob(3, me)),), (PeerBuffer(peer, received_blob),))
    ).result(WATCHDOG)
    message = ints(0)
    works = [group.isend(ints(me + 10), peer), group.irecv(message, peer)]
    for work in works:
        work.result(WATCHDOG)
        work.result(WATCHDOG)
        assert work.done()
    values = [gathered, part, root, even, uneven, received_blob, message]
    return [value.flatten().tolist() for value in values]


def test_checked_operations_that_agree_complete() -> None:
    first, second = on_ranks(2, lambda member: run_every_operation(open_checked(member)))
    assert first == [[0, 1], [2], [6], [0, 1], [1], [1, 1, 1], [11]]
    assert second == [[0, 1], [4], [6], [2, 3], [0, 1], [0, 0, 0], [10]]


Pair = tuple[Callable[[CheckedCommunicator], Work], Callable[[CheckedCommunicator], Work]]
DIFFERENT: dict[str, tuple[Pair, str]] = {
    "kinds": (
        (lambda g: g.barrier(), lambda g: g.all_reduce(ints(1))),
        r"rank 0 issued barrier.*; rank 1 issued all_reduce of 1 x torch.int64",
    ),
    "sizes": (
        (lambda g: g.all_reduce(ints(1)), lambda g: g.all_reduce(ints(1, 2))),
        r"rank 0 issued all_reduce of 1 x .*; rank 1 issued all_reduce of 2 x",
    ),
    "dtypes": (
        (lambda g: g.all_reduce(ints(1)), lambda g: g.all_reduce(ints(1).int())),
        r"torch.int64.*torch.int32",
    ),
    "roots": (
        (lambda g: g.broadcast(ints(1), 0), lambda g: g.broadcast(ints(1), 1)),
        r"broadcast from 0.*broadcast from 1",
    ),
    "rows": (
        (
            lambda g: g.all_to_all_uneven(ints(0), ints(1), [0, 1], [0, 1]),
            lambda g: g.all_to_all_uneven(ints(0, 0), ints(1), [2, 0], [1, 0]),
        ),
        r"sends \[0, 1\], receives \[0, 1\].*sends \[1, 0\], receives \[2, 0\]",
    ),
    "blobs": (
        (
            lambda g: g.exchange(Exchange((PeerBuffer(1, blob(4)),), ())),
            lambda g: g.exchange(Exchange((), (PeerBuffer(0, blob(3)),))),
        ),
        r"sends \[0, 4\], receives \[0, 0\].*sends \[0, 0\], receives \[3, 0\]",
    ),
    "a blob that nobody expects": (
        (
            lambda g: g.exchange(Exchange((PeerBuffer(1, blob(4)),), ())),
            lambda g: g.exchange(Exchange((), ())),
        ),
        r"rank 0 issued exchange",
    ),
}


@pytest.mark.parametrize(("calls", "words"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_mismatched_operations_raise_on_every_rank(calls: Pair, words: str) -> None:
    def program(member: GroupMember) -> int:
        group = open_checked(member)
        with pytest.raises(OrderMismatch, match=words):
            calls[member.rank](group)
        return total(group)

    assert on_ranks(2, program) == [3, 3]


def test_epoch_mismatch_raises_on_every_rank() -> None:
    def program(member: GroupMember) -> int:
        group = open_checked(member)
        group.epoch = member.rank
        with pytest.raises(OrderMismatch, match=r"epoch 0; rank 1 .* epoch 1"):
            group.barrier()
        group.epoch = 7
        return total(group)

    assert on_ranks(2, program) == [3, 3]


def test_missing_rank_is_named_and_refused_when_late() -> None:
    timeout_event = threading.Event()

    def program(member: GroupMember) -> int:
        group = open_checked(member, deadline=0.3 if member.rank == 0 else WATCHDOG)
        if member.rank == 0:
            with pytest.raises(BallotIncomplete) as missing:
                group.barrier()
            assert missing.value.missing == (1,)
            timeout_event.set()
        else:
            assert timeout_event.wait(WATCHDOG)
            with pytest.raises(OrderMismatch, match="given up by a rank"):
                group.barrier()
        group._deadline = WATCHDOG
        return total(group)

    assert on_ranks(2, program) == [3, 3]


def test_checked_send_does_not_block_and_times_out_softly() -> None:
    timeout_event = threading.Event()

    def program(member: GroupMember) -> list[int]:
        group, into = open_checked(member), ints(0, 0)
        if member.rank == 0:
            work = group.isend(ints(1, 2), 1)
            with pytest.raises(ResultPending):
                work.result(0.02)
            assert not work.done()
            timeout_event.set()
        else:
            assert timeout_event.wait(WATCHDOG)
            work = group.irecv(into, 0)
        work.result(WATCHDOG)
        return into.tolist()

    assert on_ranks(2, program) == [[0, 0], [1, 2]]


def test_message_size_mismatch_raises_on_both_ends() -> None:
    def program(member: GroupMember) -> bool:
        group = open_checked(member)
        words = r"rank 0 issued .* of 1 x .*; rank 1 issued .* of 2 x"
        with pytest.raises(OrderMismatch, match=words):
            message(group, ints(1) if member.rank == 0 else ints(0, 0)).result(WATCHDOG)
        return True

    def message(group: CheckedCommunicator, data: torch.Tensor) -> Work:
        return group.isend(data, 1) if group.rank == 0 else group.irecv(data, 0)

    assert on_ranks(2, program) == [True, True]


def test_message_mismatch_is_permanent_and_cancels_send() -> None:
    send_event = threading.Event()

    def program(member: GroupMember) -> bool:
        group = open_checked(member)
        if member.rank == 1:
            assert send_event.wait(WATCHDOG)
            with pytest.raises(OrderMismatch):
                group.irecv(ints(0, 0), 0)
            return True
        work = group.isend(ints(1), 1)
        send_event.set()
        for _ in range(2):
            with pytest.raises(OrderMismatch):
                work.result(WATCHDOG)
        assert work.done()
        with pytest.raises(CommunicatorFailed, match="cancelled"):
            group._inner.barrier()
        return True

    assert on_ranks(2, program) == [True, True]


def test_checked_group_asks_only_its_members() -> None:
    def program(member: GroupMember) -> list[int]:
        ranks = [2, 0] if member.rank != 1 else [1]
        group = open_checked(member, f"part {ranks}", ranks)
        return [group.rank, group.size, total(group)]

    assert on_ranks(3, program) == [[1, 2, 3], [0, 1, 1], [0, 2, 3]]


def test_rebuild_resets_checked_counters_of_survivors() -> None:
    def program(member: GroupMember) -> int:
        group = open_checked(member)
        if member.rank == 2:
            return 0
        with pytest.raises(Unsupported):
            group.abort()
        group.rebuild([1, 0])
        result = total(group)
        group.close()
        return result

    assert on_ranks(3, program) == [3, 3, 0]


def test_threads_use_several_checked_communicators() -> None:
    """Each rank's threads start in another order; no one's wait may hold up another's ballot."""

    def program(member: GroupMember) -> list[int]:
        groups = [open_checked(member, f"group {n}") for n in range(3)]
        order = groups[member.rank :] + groups[: member.rank]
        with ThreadPoolExecutor(3) as pool:
            ends = {id(g): pool.submit(lambda g=g: [total(g) for _ in range(3)]) for g in order}  # type: ignore[misc]
            return [value for group in groups for value in ends[id(group)].result(WATCHDOG)]

    assert on_ranks(2, program) == [[3] * 9] * 2
