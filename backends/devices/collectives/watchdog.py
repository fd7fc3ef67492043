"""The thread that ends operations at their deadline.

Libraries know one time-out for everything, or none, and torch's own watchdogs end the process. So
one thread a fabric fails what has passed its deadline, also where nobody asks, and lets channels
part that are being given back.
"""

import threading
import time
from collections.abc import Callable

from equipoise.backends.devices.collectives.work import DeviceWork
from equipoise.hal.support.native_call_guard import NATIVE_CALL_GUARD

TEARDOWN_INTERVAL = 0.1
"""Seconds between two looks at channels that part."""


class Watchdog:
    """Works until their end, and the thread that watches them.

    Args:
        library: by its name.
        tick: lets channels part; whether some are left.
    """

    def __init__(self, library: str, tick: Callable[[], bool]) -> None:
        self._tick = tick
        self._changed = threading.Condition()
        self._works: list[DeviceWork] = []
        self._next = float("inf")
        self._tearing_down = False
        self._closed = ""
        name = f"equipoise.{library}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def watch(self, work: DeviceWork) -> None:
        """Fail it at its deadline, or at once when the thread has ended."""
        with self._changed:
            closed = self._closed
            self._works = [kept for kept in self._works if not kept.has_ended]
            self._works.append(work)
            if work.expiry < self._next:
                self._changed.notify()
        if closed:
            work.fail(closed)

    def start_teardown(self) -> None:
        """Channels are to part."""
        with self._changed:
            self._tearing_down = True
            self._changed.notify()

    def stop(self, timeout: float) -> None:
        """End the thread, within `timeout` seconds, and all works, with an error."""
        self._shut("was closed with its fabric")
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while self._await():
                with NATIVE_CALL_GUARD:
                    self._round()
        except BaseException as error:
            self._shut(f"lost its watchdog: {error!r}")
            raise

    def _await(self) -> bool:
        """Sleep until there may be something to do; false when there never will be."""
        with self._changed:
            self._works = [work for work in self._works if not work.has_ended]
            self._next = min((work.expiry for work in self._works), default=float("inf"))
            pause = self._next - time.monotonic()
            if self._tearing_down:
                pause = min(pause, TEARDOWN_INTERVAL)
            if not self._closed and pause > 0.0:
                self._changed.wait(pause if pause < threading.TIMEOUT_MAX else None)
            return not self._closed

    def _round(self) -> None:
        now = time.monotonic()
        with self._changed:
            overdue = [work for work in self._works if work.expiry <= now]
            teardown, self._tearing_down = self._tearing_down, False
        for work in overdue:
            work.done()
        if teardown and self._tick():
            with self._changed:
                self._tearing_down = True

    def _shut(self, reason: str) -> None:
        with self._changed:
            self._closed = self._closed or reason
            works, self._works = self._works, []
            self._changed.notify()
        for work in works:
            work.fail(reason)
