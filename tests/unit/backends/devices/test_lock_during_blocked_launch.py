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


class BlockedFlag:
    """A word whose wait stands on the host, as a launch does behind a full queue."""

    def __init__(self) -> None:
        self.wait_entered, self.signal_event = threading.Event(), threading.Event()

    def wait(self, stream: Any) -> None:
        """Blocks the host until `signal` is called."""
        self.wait_entered.set()
        assert self.signal_event.wait(WATCHDOG)

    def signal(self) -> None:
        """Ends the wait, as a signal of the host does."""
        self.signal_event.set()

    @property
    def reusable(self) -> bool:
        """Whether the flag can be used for a later acquire."""
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


class FlagFactory:
    """Makes the flags of a lock and keeps those of its acquires."""

    def __init__(self) -> None:
        self.acquire_flags: list[BlockedFlag] = []

    def acquire_flag(self) -> BlockedFlag:
        self.acquire_flags.append(BlockedFlag())
        return self.acquire_flags[-1]

    def release_flag(self) -> Flag:
        return Flag()


@contextmanager
def blocked_acquire(
    lock: DeviceStreamLock, stream: DeviceStream, factory: FlagFactory
) -> Iterator[None]:
    """A thread stands in the launch of an acquire."""
    thread = threading.Thread(target=lock.acquire, args=(stream,))
    thread.start()
    while not factory.acquire_flags:
        threading.Event().wait(0.001)
    assert factory.acquire_flags[0].wait_entered.wait(WATCHDOG)
    try:
        yield
    finally:
        thread.join(WATCHDOG)
        assert not thread.is_alive()


@pytest.fixture
def watch() -> Iterator[LockWatchdog]:
    watchdog = LockWatchdog(immediate.DEVICE)
    yield watchdog
    watchdog.stop()


def test_signal_completes_during_blocked_acquire(watch: LockWatchdog) -> None:
    factory, stream = FlagFactory(), immediate.stream()
    lock = DeviceStreamLock(factory, WATCHDOG, watch)
    with blocked_acquire(lock, stream, factory):
        lock.signal(0)
    lock.release(stream)
    lock.wait(0, WATCHDOG)
    assert lock.drain(WATCHDOG) == 1


def test_watchdog_poisons_lock_during_blocked_acquire(watch: LockWatchdog) -> None:
    factory, stream = FlagFactory(), immediate.stream()
    lock = DeviceStreamLock(factory, BRIEF, watch)
    with blocked_acquire(lock, stream, factory):
        assert factory.acquire_flags[0].signal_event.wait(WATCHDOG)
    with pytest.raises(LockPoisoned):
        lock.check()


def test_drain_times_out_during_blocked_acquire(watch: LockWatchdog) -> None:
    factory, stream = FlagFactory(), immediate.stream()
    lock = DeviceStreamLock(factory, WATCHDOG, watch)
    with blocked_acquire(lock, stream, factory):
        with pytest.raises(StreamTimeout, match="being issued"):
            lock.drain(BRIEF)
        lock.poison()
    assert lock.drain(WATCHDOG) == 1
