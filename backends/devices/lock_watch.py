"""The watchdog of stream locks: a stream that waits cannot time out by itself."""

import threading
import time
from typing import Protocol

from equipoise.backends.devices.runtime import Device
from equipoise.hal.abroad import ABROAD

POLL = 0.005
"""Seconds between two looks while some acquire waits."""
ENDING = 5.0
"""Seconds that stopping waits for the thread."""


class Watched(Protocol):
    """What the watchdog looks after."""

    def tick(self, now: float) -> bool:
        """Look, at that time of the monotonic clock; whether to be looked after still."""
        ...

    def break_down(self, failure: BaseException) -> None:
        """Looking raised this, and nobody looks any more: say so to whoever asks."""
        ...


class Watch:
    """One thread an accelerator, started with the first acquire and ended with the accelerator.

    It holds a lock only as long as something of that lock is under way.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._watched: dict[Watched, None] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def add(self, lock: Watched) -> None:
        """Look after `lock` from now on."""
        with self._changed:
            self._watched[lock] = None
            if self._thread is None and not self._stopped:
                name = f"equipoise.{self._device.torch}.locks"
                self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def look(self) -> None:
        """Look at all of them once, on the calling thread."""
        for lock in list(self._watched):
            # Taken out first: what is added while we look stays.
            with self._changed:
                self._watched.pop(lock, None)
            if self._tick(lock):
                with self._changed:
                    self._watched[lock] = None

    def stop(self) -> None:
        """End the thread; bounded."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(ENDING)

    def _work(self) -> None:
        self._device.settle()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._watched)
                if self._stopped:
                    return
            with ABROAD:
                self.look()
            time.sleep(POLL)

    def _tick(self, lock: Watched) -> bool:
        try:
            return lock.tick(time.monotonic())
        except BaseException as failure:  # this thread must look after the others still
            lock.break_down(failure)
            return False
