"""Who comes to share a memory with whom, and what is said where there is none to share."""

import errno
import gc
import os
import threading

import pytest
from helpers.harnesses.host_pool import (
    DESCRIPTOR,
    LAYOUT,
    alone,
    fill,
    holdings,
    holds,
    opened,
    refused,
    sealed,
)
from helpers.processes.thread_control_plane import ThreadControl, meet
from helpers.watchdog import WATCHDOG

from equipoise.balancer.experts.host_pool import rendezvous, shared_memory
from equipoise.balancer.experts.host_pool.layout import PoolLayout
from equipoise.balancer.experts.host_pool.pool import HostExpertPool, ranks_on_node
from equipoise.balancer.experts.host_pool.rendezvous import MemoryHandle
from equipoise.balancer.experts.host_pool.shared_memory import MemoryLimit
from equipoise.hal.accelerator import Topology
from equipoise.hal.errors import (
    BallotIncomplete,
    ExpertPoolError,
    HostMemoryExhausted,
    PoolIncomplete,
    PoolMismatch,
    RanksDiffer,
)

pytestmark = pytest.mark.slow


def test_pool_open_refuses_too_little_memory_before_allocating(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocations: list[int] = []
    monkeypatch.setattr(
        rendezvous, "available_memory", lambda: MemoryLimit(1000, "control group x")
    )
    monkeypatch.setattr(shared_memory, "create", lambda nbytes: allocations.append(nbytes))
    expected = f"wants {LAYOUT.nbytes} bytes, and control group x leaves 1000"
    assert all(expected in text for text in refused(opened, 3, HostMemoryExhausted))
    assert allocations == []


def test_pool_open_refuses_more_memory_than_machine_has() -> None:
    huge = PoolLayout(DESCRIPTOR, layers=1 << 20, experts=1 << 20)
    for text in refused(lambda control: opened(control, huge), 2, HostMemoryExhausted):
        assert f"wants {huge.nbytes} bytes" in text


def test_pool_open_fails_on_all_ranks_when_memory_fills_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fallocate = os.posix_fallocate

    def fail_when_full(descriptor: int, offset: int, nbytes: int) -> None:
        if offset >= LAYOUT.expert_offset(1, 1):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fallocate(descriptor, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", fail_when_full)
    for text in refused(opened, 2, PoolIncomplete):
        assert text.startswith("rank 0: cannot reserve")
        assert "; rank 1: cannot reserve" in text


def test_pool_open_fails_on_all_ranks_when_owner_cannot_allocate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(nbytes: int) -> int:
        raise ExpertPoolError("no shared memory here")

    monkeypatch.setattr(shared_memory, "create", none)
    assert all("no shared memory here" in text for text in refused(opened, 3, ExpertPoolError))


def test_pool_open_names_ranks_with_different_layouts() -> None:
    def program(control: ThreadControl) -> None:
        opened(control, LAYOUT if control.rank != 2 else PoolLayout(DESCRIPTOR, 3, 4))

    for text in refused(program, 4, RanksDiffer):
        assert text == "pool 'model': ranks differ in experts: ranks 0..1, 3 have 5; rank 2 has 4"


def test_pool_open_times_out_on_missing_rank() -> None:
    def program(control: ThreadControl) -> None:
        if control.rank != 1:
            HostExpertPool.open(control, range(3), LAYOUT, name="x", timeout=0.2)

    before = holdings()
    answers = meet(3, program)
    assert [type(a) for a in answers] == [BallotIncomplete, type(None), BallotIncomplete]
    del answers
    gc.collect()
    assert holdings() == before


def test_pool_open_refuses_rank_outside_its_node_group() -> None:
    def program(control: ThreadControl) -> None:
        HostExpertPool.open(control, [1, 2], LAYOUT, name="x", timeout=WATCHDOG)

    with pytest.raises(ExpertPoolError, match=r"rank 0 is not one of its node's \(1, 2\)"):
        alone(program)


def forbid_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank may look into another's /proc."""

    def refuse_open(self: MemoryHandle, layout: PoolLayout, proc: object = None) -> int:
        raise PoolMismatch("cannot open it: Permission denied")

    monkeypatch.setattr(MemoryHandle, "open", refuse_open)


def test_pool_open_uses_socket_when_proc_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_proc(monkeypatch)

    def program(control: ThreadControl) -> tuple[bool, tuple[int, ...]]:
        pool = sealed(control)
        contents_equal = holds(pool)
        pool.close()
        return contents_equal, pool.ranks

    assert meet(3, program) == [(True, (0, 1, 2))] * 3


CONTAINERS = [
    [[0, 1, 2, 3]],
    [[0, 1], [2, 3]],
    [[0, 3], [1, 2]],
    [[0], [1, 2], [3]],
    [[0], [1], [2], [3]],
]


@pytest.mark.parametrize("containers", CONTAINERS)
def test_pool_is_shared_among_ranks_that_reach_each_other(
    containers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several containers under one node name: to each the others' processes are not there."""
    container_of = {rank: n for n, ranks in enumerate(containers) for rank in ranks}
    rank_of_thread: dict[int, int] = {}
    original_of = MemoryHandle.of

    def of(descriptor: int, token: bytes) -> MemoryHandle:
        handle = original_of(descriptor, token)
        return MemoryHandle(
            f"{container_of[rank_of_thread[threading.get_ident()]]}",
            handle.process,
            handle.start_time,
            handle.descriptor,
            handle.token,
        )

    monkeypatch.setattr(MemoryHandle, "of", of)
    monkeypatch.setattr(
        "equipoise.balancer.experts.host_pool.rendezvous.boot_id",
        lambda: f"{container_of[rank_of_thread[threading.get_ident()]]}",
    )

    def program(control: ThreadControl) -> tuple[int, ...]:
        rank_of_thread[threading.get_ident()] = control.rank
        pool = sealed(control)
        assert holds(pool)
        pool.close()
        return pool.ranks

    sharing_ranks = meet(4, program)
    assert sharing_ranks == [tuple(containers[container_of[rank]]) for rank in range(4)]


def test_pools_of_two_jobs_on_one_machine_do_not_mix() -> None:
    """Two jobs on one machine, with the same ranks and names and unlike weights."""
    middle = threading.Barrier(4)

    def job(seed: int) -> list[object]:
        def program(control: ThreadControl) -> bool:
            pool = opened(control)
            middle.wait(WATCHDOG)
            fill(pool, seed)
            middle.wait(WATCHDOG)
            pool.seal(WATCHDOG)
            contents_equal = holds(pool, seed)
            middle.wait(WATCHDOG)
            pool.close()
            return contents_equal

        return list(meet(2, program))

    answers: dict[int, list[object]] = {}
    jobs = [threading.Thread(target=lambda s=s: answers.update({s: job(s)})) for s in (1, 2)]
    for each in jobs:
        each.start()
    for each in jobs:
        each.join(WATCHDOG)
    assert answers == {1: [True, True], 2: [True, True]}


def test_pools_of_two_models_are_separate() -> None:
    draft_layout = PoolLayout(DESCRIPTOR[1:], 1, 2)

    def program(control: ThreadControl) -> bool:
        target, draft = opened(control, LAYOUT, "target"), opened(control, draft_layout, "draft")
        for pool, seed in ((target, 1), (draft, 2)):
            fill(pool, seed)
            pool.seal(WATCHDOG)
        contents_equal = holds(target, 1) and holds(draft, 2)
        target.close()
        contents_equal = contents_equal and holds(draft, 2)
        draft.close()
        return contents_equal

    assert meet(2, program) == [True, True]


def test_neighbours_are_ranks_with_same_node_name() -> None:
    nodes = ["a", "b", "a", "c"]

    def program(control: ThreadControl) -> tuple[int, ...]:
        topology = Topology(0, nodes[control.rank], -1)
        return ranks_on_node(control, topology, name="x", timeout=WATCHDOG)

    assert meet(4, program) == [(0, 2), (1,), (0, 2), (3,)]
