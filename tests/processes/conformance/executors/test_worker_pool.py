"""Rank processes are forked from one that has imported everything, and none outlives its pool."""

import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes.conformance import rank_driver as driving

from equipoise.hal.conformance.executors.leak_detector import all_threads_stopped
from equipoise.hal.conformance.executors.worker_pool import WorkerPool
from equipoise.hal.errors import Violation

TIMEOUT_S = 200.0


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    worker_pool = WorkerPool([driving.RANK])
    yield worker_pool
    worker_pool.close()


def ask(pool: WorkerPool, rank: int, **order: object) -> dict[str, Any]:
    pool.send({rank: order})
    return pool.gather([rank], (), TIMEOUT_S, lambda _rank, _how: None)[rank]


def has_ended(pid: int) -> bool:
    """Whether a process has exited: it does not exist, or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_until(holds: Callable[[], bool]) -> None:
    expiry = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < expiry
        time.sleep(0.01)


def wait_until_all_ended(pids: list[int]) -> None:
    wait_until(lambda: all(map(has_ended, pids)))


def test_pool_ranks_are_forks_of_one_server(pool: WorkerPool) -> None:
    pool.start(range(3))
    replies = [ask(pool, rank) for rank in range(3)]
    assert [one["pid"] for one in replies] == [pool.workers[rank].pid for rank in range(3)]
    assert len({one["parent"] for one in replies}) == 1
    assert {one["imported_by"] for one in replies} == {replies[0]["parent"]}


def test_pool_spawns_ranks_when_import_starts_threads() -> None:
    pool = WorkerPool([driving.THREADED])
    try:
        pool.start(range(2))
        replies = [ask(pool, rank) for rank in range(2)]
        assert all(one["imported_by"] == one["pid"] for one in replies)
    finally:
        pool.close()


def test_pool_ranks_share_no_descriptors(pool: WorkerPool) -> None:
    pool.start(range(3))
    counts = [ask(pool, rank)["descriptors"] for rank in range(3)]
    assert counts[0] == counts[1] == counts[2]


def test_pool_reports_how_rank_ended(pool: WorkerPool) -> None:
    pool.start(range(2))
    with pytest.raises(Violation, match="rank 0 exited with 3"):
        ask(pool, 0, exit=3)
    pool.start(range(2))
    with pytest.raises(Violation, match="rank 1 was killed by SIGKILL"):
        ask(pool, 1, kill=signal.SIGKILL)
    assert pool.workers == {}


def test_halted_detects_stopped_and_ended_process(pool: WorkerPool) -> None:
    pool.start([0])
    pid = ask(pool, 0)["pid"]
    assert not all_threads_stopped(pid)
    for how in (signal.SIGSTOP, signal.SIGKILL):
        os.kill(pid, how)
        wait_until(lambda: all_threads_stopped(pid))


def test_pool_replaces_stopped_rank(pool: WorkerPool) -> None:
    pool.start(range(2))
    before = ask(pool, 0)
    os.kill(before["pid"], signal.SIGSTOP)
    pool.kill([0])
    assert has_ended(before["pid"])
    pool.start(range(2))
    after = ask(pool, 0)
    assert after["pid"] != before["pid"]
    assert after["parent"] == before["parent"]


def test_pool_quotes_error_of_rank_that_fails_to_start() -> None:
    pool = WorkerPool([driving.FAILING])
    try:
        pool.start([0])
        with pytest.raises(Violation, match=r"rank 0 exited with 1(?s:.*)this module is no rank"):
            ask(pool, 0)
    finally:
        pool.close()


def test_pool_quotes_import_error_of_rank_module() -> None:
    pool = WorkerPool(["equipoise.nowhere"])
    with pytest.raises(Violation, match=r"no rank can be started(?s:.*)equipoise\.nowhere"):
        pool.start([0])
    assert pool.workers == {}
    pool.close()


def test_pool_recovers_from_server_death(
    pool: WorkerPool,
) -> None:
    pool.start([0])
    reply = ask(pool, 0)
    os.kill(reply["parent"], signal.SIGKILL)
    wait_until_all_ended([reply["parent"], reply["pid"]])
    pool.kill([0])
    pool.start([0])
    assert ask(pool, 0)["parent"] != reply["parent"]


def test_pool_close_leaves_no_process_thread_or_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    pool = WorkerPool([driving.RANK])
    pool.start(range(3))
    replies = [ask(pool, rank) for rank in range(3)]
    os.kill(replies[1]["pid"], signal.SIGSTOP)
    pool.close()
    assert all(has_ended(one["pid"]) and has_ended(one["parent"]) for one in replies)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


@pytest.mark.parametrize("module", [driving.RANK, driving.THREADED])
def test_pool_ranks_end_with_killed_driver(module: str) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-P", "-m", driving.DRIVER, module],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert driver.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(driver.stdout, selectors.EVENT_READ)
        assert selector.select(TIMEOUT_S)
    pids = [int(word) for word in driver.stdout.readline().split()]
    assert len(pids) == 4
    driver.kill()
    driver.wait()
    driver.stdout.close()
    wait_until_all_ended(pids)
