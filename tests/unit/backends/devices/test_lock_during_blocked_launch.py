"""A launch that stands in the driver, behind a full queue: the lock's host side must come through.

Else nobody could give the signal that it stands behind, nor poison. Clauses L6, C8.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from helpers.fakes import synchronous_runtime as immediate
from helpers.watchdog import WATCHDOG

from equipoise.backends.devices.lock import DeviceStreamLock, LockWatchdog
from equipoise.backends.devices.stream import DeviceStream
from equipoise.hal.errors import LockPoisoned, StreamTimeout

BRIEF = 0.05


class Standing:
    """A word whose wait stands on the host, as a launch does behind a full queue."""

    def __init__(self) -> None:
        self.entered, self.given = threading.Event(), threading.Event()

    def wait(self, stream: Any) -> None:
        """Until it was given."""
        self.entered.set()
        assert self.given.wait(WATCHDOG)

    def signal(self) -> None:
        """As the host does."""
        self.given.set()

    @property
    def reusable(self) -> bool:
        """As a vendor says."""
        return True


class Flag:
    """An empty word."""

    def __init__(self) -> None:
        self._set = False

    def set(self, stream: Any) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def clear(self) -> None:
        self._set = False


class Both:
    """Makes them."""

    def __init__(self) -> None:
        self.made: list[Standing] = []

    def acquire_flag(self) -> Standing:
        self.made.append(Standing())
        return self.made[-1]

    def release_flag(self) -> Flag:
        return Flag()


@contextmanager
def acquiring(lock: DeviceStreamLock, stream: DeviceStream, words: Both) -> Iterator[None]:
    """A thread stands in the launch of an acquire."""
    thread = threading.Thread(target=lock.acquire, args=(stream,))
    thread.start()
    while not words.made:
        threading.Event().wait(0.001)
    assert words.made[0].entered.wait(WATCHDOG)
    try:
        yield
    finally:
        thread.join(WATCHDOG)
        assert not thread.is_alive()


@pytest.fixture
def watch() -> Iterator[LockWatchdog]:
    made = LockWatchdog(immediate.DEVICE)
    yield made
    made.stop()


def test_signal_completes_during_blocked_acquire(watch: LockWatchdog) -> None:
    words, stream = Both(), immediate.stream()
    lock = DeviceStreamLock(words, WATCHDOG, watch)
    with acquiring(lock, stream, words):
        lock.signal(0)
    lock.release(stream)
    lock.wait(0, WATCHDOG)
    assert lock.drain(WATCHDOG) == 1


def test_watchdog_poisons_lock_during_blocked_acquire(watch: LockWatchdog) -> None:
    words, stream = Both(), immediate.stream()
    lock = DeviceStreamLock(words, BRIEF, watch)
    with acquiring(lock, stream, words):
        assert words.made[0].given.wait(WATCHDOG)
    with pytest.raises(LockPoisoned):
        lock.check()


def test_drain_times_out_during_blocked_acquire(watch: LockWatchdog) -> None:
    words, stream = Both(), immediate.stream()
    lock = DeviceStreamLock(words, WATCHDOG, watch)
    with acquiring(lock, stream, words):
        with pytest.raises(StreamTimeout, match="being issued"):
            lock.drain(BRIEF)
        lock.poison()
    assert lock.drain(WATCHDOG) == 1
