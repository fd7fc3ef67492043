"""The lock around what is issued. Needs no torch_npu."""

import threading
from concurrent.futures import ThreadPoolExecutor

from helpers.watchdog import WATCHDOG

from equipoise.backends.devices.issue_lock import IssueLock


def queue_up(gate: IssueLock, count: int) -> None:
    """Until so many threads stand in line."""
    expiry = threading.Event()
    for _ in range(int(WATCHDOG / 0.001)):
        if len(gate._queue) == count:
            return
        expiry.wait(0.001)
    raise AssertionError(f"{len(gate._queue)} threads wait, not {count}")


def test_issue_lock_is_reentrant() -> None:
    gate = IssueLock()
    with gate, gate:
        pass

    def enter() -> bool:
        with gate:
            return True

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(enter).result(WATCHDOG)  # it was given back as often as it was taken


def test_issue_lock_serves_threads_in_arrival_order() -> None:
    gate, order = IssueLock(), list[int]()

    def enter(number: int) -> None:
        with gate:
            order.append(number)

    with ThreadPoolExecutor(3) as pool:
        with gate:
            futures = []
            for number in range(3):
                futures.append(pool.submit(enter, number))
                queue_up(gate, number + 1)
        with gate:  # its last holder comes behind those who wait
            order.append(3)
        for one in futures:
            one.result(WATCHDOG)
    assert order == [0, 1, 2, 3]


def test_issue_lock_is_held_by_one_thread_at_a_time() -> None:
    gate, inside, most = IssueLock(), [0], [0]

    def work() -> None:
        for _ in range(200):
            with gate:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work) for _ in range(4)]:
            future.result(WATCHDOG)
    assert most == [1]
