"""A point that is reached once."""

import threading
from collections.abc import Callable

from helpers.watchdog import WATCHDOG

from equipoise.backends.cpu.stream import Latch

WAITERS = 8


def start_threads(work: Callable[[], object], count: int) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_latch_set_releases_all_waiters() -> None:
    latch, results = Latch(), []
    threads = start_threads(lambda: results.append(latch.wait(WATCHDOG)), WAITERS)
    assert not latch.is_set()
    latch.set()
    for thread in threads:
        thread.join(WATCHDOG)
    assert results == [True] * WAITERS
    assert latch.is_set()


def test_latch_stays_set_after_concurrent_sets() -> None:
    for _ in range(50):
        latch, ready = Latch(), threading.Barrier(WAITERS)
        results: list[int] = []

        def reach(
            latch: Latch = latch,
            ready: threading.Barrier = ready,
            results: list[int] = results,
        ) -> None:
            results.append(ready.wait(WATCHDOG))
            latch.set()
            results.append(-1)

        for thread in start_threads(reach, WAITERS):
            thread.join(WATCHDOG)
        assert results.count(-1) == WAITERS
        assert latch.wait(0.0)
        assert latch.wait(WATCHDOG)


def test_latch_wait_times_out() -> None:
    latch = Latch()
    assert not latch.wait(0.01)
    assert not latch.wait(0.0)
    assert not latch.wait(-1.0)
    latch.set()
    assert latch.wait(float("inf"))
