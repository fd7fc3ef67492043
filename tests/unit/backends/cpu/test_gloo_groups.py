"""Communicators among some ranks, and shared by threads: clauses P6, X2, X3, E2."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.processes.thread_ranks import GroupMember, on_ranks
from helpers.watchdog import WATCHDOG
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from equipoise.backends.cpu.gloo_communicator import GlooCommunicator
from equipoise.hal.communicator import Communicator
from equipoise.hal.errors import CommunicatorFailed, Unsupported

BRIEF = 0.2
ATTEMPTS = 20
"""Gloo chooses by port numbers which rank calls the other: a coin is tossed so often."""


def total(group: Communicator) -> int:
    value = torch.tensor([10**group.rank])
    group.all_reduce(value).result(WATCHDOG)
    return int(value)


@pytest.mark.parametrize("ranks", [[1], [0, 0], [0, 2], [-1, 0], []])
def test_open_refuses_invalid_group_ranks(ranks: list[int]) -> None:
    def program(member: GroupMember) -> bool:
        if member.rank == 0:
            with pytest.raises(Unsupported):
                member.fabric.open("part", ranks)
        return True

    assert on_ranks(2, program) == [True, True]


def test_gloo_uses_interface_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert on_ranks(2, lambda member: total(member.fabric.open("named"))) == [11, 11]


def test_gloo_names_missing_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(CommunicatorFailed, match="GLOO_SOCKET_IFNAME=nowhere0: no such interface"):
        on_ranks(2, lambda member: total(member.fabric.open("named")))


def test_open_refuses_duplicate_purpose() -> None:
    def program(member: GroupMember) -> int:
        group = member.fabric.open("once")
        with pytest.raises(Unsupported, match="opened before"):
            member.fabric.open("once")
        return total(group)

    assert on_ranks(2, program) == [11, 11]


def test_closed_communicators_leave_neither_objects_nor_keys() -> None:
    def program(member: GroupMember) -> list[int]:
        fabric: Any = member.fabric
        open_counts = []
        for number in range(4):
            group = fabric.open(f"purpose {number}")
            group.barrier().result(WATCHDOG)
            group.close()
            open_counts.append(len(fabric._open))
        last = fabric.open("the last")
        last.all_reduce(torch.ones(1)).result(WATCHDOG)
        prefixes = "purpose", "the last"
        keys = [key for key in fabric.control.store.list_keys() if key.startswith(prefixes)]
        return [*open_counts, len(fabric._open), len(keys)]

    assert on_ranks(2, program) == [[1, 1, 1, 1, 1, 0]] * 2


@pytest.mark.slow
def test_open_succeeds_again_after_peer_came_too_late() -> None:
    barrier = threading.Barrier(2)

    def program(member: GroupMember) -> int:
        if member.rank == 0:
            with pytest.raises(CommunicatorFailed, match="did not all meet"):
                member.fabric.open("late")
        barrier.wait(WATCHDOG)
        return total(member.fabric.open("late"))

    assert on_ranks(2, program, deadline=5.0) == [11, 11]


def test_warm_refuses_unknown_links_and_closed_group() -> None:
    def program(member: GroupMember) -> bool:
        group = member.fabric.open("links")
        group.warm([(0, 1), (1, 0), (0, 1)])
        for link in ((0, 2), (-1, 0)):
            with pytest.raises(Unsupported, match="link"):
                group.warm([link])
        group.close()
        group.close()
        with pytest.raises(CommunicatorFailed, match="closed"):
            group.warm([(0, 1)])
        return True

    assert on_ranks(2, program) == [True, True]


def test_threads_share_communicator_without_loss() -> None:
    """Each thread sends a rising sequence to the peer; none is lost, doubled or torn."""
    each, threads = 25, 4

    def program(member: GroupMember) -> list[list[int]]:
        group = member.fabric.open("shared")
        peer = 1 - member.rank
        into = [torch.zeros(2, dtype=torch.int64) for _ in range(each * threads)]
        receives = [group.irecv(data, peer) for data in into]

        def send(thread: int) -> None:
            works = [group.isend(torch.tensor([thread, n]), peer) for n in range(each)]
            for work in works:
                work.result(WATCHDOG)

        with ThreadPoolExecutor(threads) as pool:
            for end in [pool.submit(send, thread) for thread in range(threads)]:
                end.result(WATCHDOG)
        for work in receives:
            work.result(WATCHDOG)
        return [data.tolist() for data in into]

    for received in on_ranks(2, program):
        by_thread = [[n for thread, n in received if thread == sender] for sender in range(threads)]
        assert all(a < b for numbers in by_thread for a, b in pairwise(numbers))
        assert [len(numbers) for numbers in by_thread] == [each] * threads


def test_concurrent_sends_are_all_kept_until_end() -> None:
    """Operations dropped by their threads: not one is forgotten while it is in flight (K2)."""

    def program(member: GroupMember) -> int:
        group = member.fabric.open("dropped")
        inner, reap_lock, overlaps = group._reap, threading.Lock(), []  # type: ignore[attr-defined]

        def reap() -> None:
            overlaps.append(not reap_lock.acquire(blocking=False))
            time.sleep(0.001)
            inner()
            if not overlaps[-1]:
                reap_lock.release()

        group._reap = reap  # type: ignore[attr-defined]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: group.isend(torch.tensor([n]), 1 - member.rank), range(40)))
        inflight_count = len(group._inflight)  # type: ignore[attr-defined]
        member.fabric.control.cast("sent", b"")
        member.fabric.control.collect("sent", WATCHDOG)
        for _ in range(40):
            group.irecv(torch.tensor([0]), 1 - member.rank).result(WATCHDOG)
        assert not any(overlaps)
        return inflight_count

    assert on_ranks(2, program) == [40, 40]


class WatchedStore(Store):
    """A store that tells `before` of each of its calls, by call and keys."""

    def __init__(self, inner: Store, before: Callable[[str, list[str]], None]) -> None:
        super().__init__()
        self._inner = inner
        self._before = before

    def set(self, key: str, value: bytes | str) -> None:
        self._before("set", [key])
        self._inner.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        self._before("get", [key])
        return self._inner.get(key)

    def wait(  # type: ignore[override]
        self, keys: list[str], timeout: timedelta
    ) -> None:
        self._before("wait", keys)
        self._inner.wait(keys, timeout)

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(key, amount)

    def deleteKey(self, key: str) -> bool:  # so torch calls it from C++
        return self._inner.delete_key(key)


def rebuild_group(store: Store, rank: int) -> GlooCommunicator:
    """Rebuilds a group of this rank alone into one of two ranks."""
    group = GlooCommunicator(HashStore(), "left early", (rank,), rank, WATCHDOG)
    group._store = store
    group.rebuild((0, 1))
    return group


def open_group(store: Store, rank: int) -> GlooCommunicator:
    return GlooCommunicator(store, "left early", (0, 1), rank, WATCHDOG)


def closes_before_connection(make: Callable[[Store, int], GlooCommunicator]) -> bool | None:
    """Whether rank 1, which closes what it has just opened, does so while rank 0, which has told
    its address, has not connected yet. None where gloo let rank 0 call rank 1, which then waits."""
    shared, resume_event, closed_event = HashStore(), threading.Event(), threading.Event()
    announced_keys: list[str] = []
    outcomes: list[bool | None] = []

    def delay_connection(call: str, keys: list[str]) -> None:
        if call == "wait" and keys[0].endswith("/1"):  # the address of rank 1
            outcomes.append(closed_event.is_set() if resume_event.wait(BRIEF) else None)

    def announce(call: str, keys: list[str]) -> None:
        if call == "set" and announced_keys:  # something after its address: it has connected
            resume_event.set()
        announced_keys.extend(keys)

    def leave() -> None:
        make(WatchedStore(shared, announce), 1).close()
        closed_event.set()
        resume_event.set()

    with ThreadPoolExecutor(2) as pool:
        open_future = pool.submit(make, WatchedStore(shared, delay_connection), 0)
        pool.submit(leave).result(2 * WATCHDOG)
        open_future.result(2 * WATCHDOG).close()
    return outcomes[0]


@pytest.mark.parametrize("make", [open_group, rebuild_group])
def test_opening_returns_on_no_rank_before_all_have_connected(
    make: Callable[[Store, int], GlooCommunicator],
) -> None:
    outcomes = (closes_before_connection(make) for _ in range(ATTEMPTS))
    assert next(early for early in outcomes if early is not None) is False
