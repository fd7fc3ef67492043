"""How tickets, pools and their threads end: every wait is bounded, nobody is left unheard."""

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers.harnesses.host_copies import SMALL, STILL, ended, guarded, noise, threads
from helpers.watchdog import WATCHDOG

from equipoise.balancer.experts.transfer import copy_threads
from equipoise.balancer.experts.transfer.copy_threads import (
    PLAIN,
    CopyHandle,
    CopyLimits,
    CopyThreadPool,
    HostCopy,
)
from equipoise.hal.accelerator import Topology
from equipoise.hal.errors import CopyAbandoned, CopyPending, HostCopyError


@pytest.fixture(scope="module")
def copy_pool() -> Iterator[CopyThreadPool]:
    with CopyThreadPool(SMALL, threads=4) as pool:
        yield pool


def test_ticket_wait_times_out_and_copy_goes_on() -> None:
    source, destination = noise(1000), guarded(1000)
    copy_pool = CopyThreadPool(STILL, threads=2)
    copy_handle = copy_pool.submit([HostCopy(source, destination)])
    with pytest.raises(CopyPending, match=r"not done within 0\.05 s"):
        copy_handle.wait(0.05)
    assert not copy_handle.done()
    with pytest.raises(CopyAbandoned, match="1 copies"):
        copy_pool.close(0.0)
    assert copy_handle.done()
    with pytest.raises(CopyAbandoned):
        copy_handle.wait(WATCHDOG)


def test_ticket_waiter_gets_error_when_copy_threads_closes() -> None:
    copy_pool = CopyThreadPool(STILL, threads=1)
    copy_handle = copy_pool.submit([HostCopy(noise(1000), torch.empty(1000, dtype=torch.uint8))])
    error_types: list[type[BaseException]] = []

    def wait() -> None:
        try:
            copy_handle.wait(WATCHDOG)
        except HostCopyError as error:
            error_types.append(type(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    with pytest.raises(CopyAbandoned):
        copy_pool.close(0.05)
    waiter.join(WATCHDOG)
    assert error_types == [CopyAbandoned]


@pytest.mark.slow
def test_copy_threads_keeps_tensors_alive_until_copied() -> None:
    copy_pool = CopyThreadPool(STILL, threads=1)
    source, destination = noise(1000), torch.empty(1000, dtype=torch.uint8)
    references = [weakref.ref(source), weakref.ref(destination)]
    copy_pool.submit([HostCopy(source, destination)])
    del source, destination
    gc.collect()
    assert all(tensor() is not None for tensor in references)
    with pytest.raises(CopyAbandoned):
        copy_pool.close(0.0)
    gc.collect()
    assert all(tensor() is None for tensor in references)


@pytest.mark.slow
def test_copy_threads_releases_tensors_of_finished_ticket(copy_pool: CopyThreadPool) -> None:
    source = noise(1000)
    reference = weakref.ref(source)
    copy_handle = copy_pool.submit([HostCopy(source, torch.empty(1000, dtype=torch.uint8))])
    del source
    expiry = time.monotonic() + WATCHDOG
    while reference() is not None and time.monotonic() < expiry:
        copy_pool.submit([]).wait(WATCHDOG)  # any later call looks after earlier ones
        gc.collect()
    assert reference() is None
    assert copy_handle.done()


def test_dropped_copy_threads_ends_threads_and_warns() -> None:
    before = threads()
    copy_pool = CopyThreadPool(STILL, threads=5)
    pool_threads = threads() - before
    copy_handle = copy_pool.submit([HostCopy(noise(1000), torch.empty(1000, dtype=torch.uint8))])
    assert len(pool_threads) == 5
    holder = [copy_pool]
    del copy_pool
    with pytest.warns(ResourceWarning, match="dropped with 1 copies"):
        holder.clear()
    assert ended(pool_threads)
    with pytest.raises(CopyAbandoned):
        copy_handle.wait(WATCHDOG)


def is_abandoned(copy_handle: CopyHandle) -> bool:
    try:
        copy_handle.wait(0.0)
    except CopyAbandoned:
        return True
    return False


def test_copy_threads_close_under_load_ends_every_ticket() -> None:
    copy_pool = CopyThreadPool(CopyLimits("load", 4096, 1e6), threads=3)
    submitted_copies: list[tuple[CopyHandle, HostCopy]] = []
    error_texts: list[object] = []

    def load(seed: int) -> None:
        try:
            while True:
                copy = HostCopy(noise(20000, seed), guarded(20000))
                submitted_copies.append((copy_pool.submit([copy]), copy))
        except HostCopyError as error:
            error_texts.append(str(error))

    users = [threading.Thread(target=load, args=(seed,)) for seed in range(3)]
    for user in users:
        user.start()
    while len(submitted_copies) < 20:
        time.sleep(0.001)
    with pytest.raises(CopyAbandoned):
        copy_pool.close(0.0)
    for user in users:
        user.join(WATCHDOG)
    assert error_texts == ["refused: the copy threads are closed"] * 3
    for copy_handle, copy in submitted_copies:
        assert copy_handle.done()
        assert is_abandoned(copy_handle) or torch.equal(copy.source, copy.destination)


def test_copy_threads_close_finishes_copies_and_refuses_new_ones(copy_pool: CopyThreadPool) -> None:
    before = threads()
    closing_pool = CopyThreadPool(SMALL, threads=2)
    pool_threads = threads() - before
    source, destination = noise(100_000), torch.empty(100_000, dtype=torch.uint8)
    copy_handle = closing_pool.submit([HostCopy(source, destination)])
    closing_pool.close(WATCHDOG)
    closing_pool.close(0.0)
    assert torch.equal(source, destination)
    copy_handle.wait(0.0)
    assert len(pool_threads) == 2
    assert ended(pool_threads)
    with pytest.raises(HostCopyError, match="closed"):
        closing_pool.submit([])


def test_copy_threads_exit_does_not_hide_error_of_with_block() -> None:
    def fail() -> None:
        with CopyThreadPool(STILL, threads=1) as copy_pool:
            copy_pool.submit([HostCopy(noise(1000), torch.empty(1000, dtype=torch.uint8))])
            raise KeyError

    with pytest.warns(ResourceWarning, match="1 copies"), pytest.raises(KeyError):
        fail()


def test_copy_threads_threads_are_pinned_near_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    available_cpus = copy_threads.available_cpus()
    near_cpus = frozenset({min(available_cpus)})
    monkeypatch.setattr(
        copy_threads, "near_cpus", lambda node, cpus: near_cpus if node == 3 else frozenset()
    )
    before = threads()
    with CopyThreadPool.near_accelerator(Topology(0, "here", 3)) as copy_pool:
        pool_threads = threads() - before
        assert (copy_pool.cpus, copy_pool.threads, len(pool_threads)) == (near_cpus, 1, 1)
        assert [os.sched_getaffinity(thread) for thread in pool_threads] == [near_cpus]
    assert ended(pool_threads)
    with CopyThreadPool.near_accelerator(Topology(0, "here", -1)) as copy_pool:
        pool_threads = threads() - before
        assert copy_pool.cpus == frozenset()
        assert (
            copy_pool.threads
            == len(pool_threads)
            == copy_threads.thread_count(len(available_cpus), 1)
        )
        assert all(os.sched_getaffinity(thread) == available_cpus for thread in pool_threads)


@pytest.mark.parametrize("cpu", [-1, 1023, 5000])
def test_copy_threads_refuses_missing_cpu_and_leaves_no_thread(cpu: int) -> None:
    before = threads()
    with pytest.raises(HostCopyError, match="copy threads 'plain'"):
        CopyThreadPool(PLAIN, threads=3, cpus=frozenset({cpu}))
    assert ended(threads() - before)


BAD_SETTINGS: dict[str, tuple[Callable[[], object], str]] = {
    "no threads": (lambda: CopyThreadPool(PLAIN, threads=0), "threads: expected 1 to"),
    "no chunk": (lambda: CopyLimits("x", 0, 1.0), "multiples of 64 bytes, not 0"),
    "odd chunk": (lambda: CopyLimits("x", 100, 1.0), "multiples of 64 bytes, not 100"),
    "backwards": (lambda: CopyLimits("x", 64, -1.0), "no rate: -1.0"),
    "no number": (lambda: CopyLimits("x", 64, float("nan")), "no rate: nan"),
    "endless": (lambda: CopyLimits("x", 64, float("inf")), "no rate: inf"),
}


@pytest.mark.parametrize(("call", "message"), BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_copy_threads_refuses_bad_settings(call: Callable[[], object], message: str) -> None:
    with pytest.raises(HostCopyError, match=message):
        call()


def test_copy_threads_in_forked_process_raises() -> None:
    copy_pool = CopyThreadPool(SMALL, threads=2)
    copy_handle = copy_pool.submit([])
    child = os.fork()
    if child == 0:
        refusals = 0
        for call in (lambda: copy_pool.submit([]), lambda: copy_pool.close(0.0), copy_handle.done):
            try:
                call()
            except HostCopyError:
                refusals += 1
        del copy_pool
        os._exit(refusals)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    copy_pool.close(WATCHDOG)
