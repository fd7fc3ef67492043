"""The thread that ends operations at their deadline.

Libraries have one time-out for all operations, or none, and torch's own watchdogs end the process.
So one thread per fabric fails operations at their deadline, also if nobody asks for them, and
advances the release of communicators.
"""

import threading
import time
from collections.abc import Callable

from equipoise.backends.devices.collectives.work import DeviceWork
from equipoise.hal.support.native_call_guard import NATIVE_CALL_GUARD

TEARDOWN_INTERVAL = 0.1
"""Seconds between two polls of communicators that are being released: each poll asks the store, and
nobody waits for the result."""


class Watchdog:
    """Watches operations until they end, on a thread of its own.

    Args:
        library: name of the library.
        tick: advances the release of communicators; returns whether some are left.
    """

    def __init__(self, library: str, tick: Callable[[], bool]) -> None:
        self._tick = tick
        self._changed = threading.Condition()
        self._works: list[DeviceWork] = []
        self._next = float("inf")
        self._tearing_down = False
        self._close_reason = ""
        name = f"equipoise.{library}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def watch(self, work: DeviceWork) -> None:
        """Fail the operation at its deadline, or at once if the watchdog has ended."""
        with self._changed:
            close_reason = self._close_reason
            self._works = [pending for pending in self._works if not pending.has_ended]
            self._works.append(work)
            # Only then: waking the thread for each operation would cost a switch per message.
            if work.expiry < self._next:
                self._changed.notify()
        if close_reason:
            work.fail(close_reason)

    def start_teardown(self) -> None:
        """Call `tick` from now on, until nothing is left."""
        with self._changed:
            self._tearing_down = True
            self._changed.notify()

    def stop(self, timeout: float) -> None:
        """Fail all operations and end the thread; waits for it at most `timeout` seconds."""
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
        """Sleep until there may be something to do. Returns False once it was closed."""
        with self._changed:
            self._works = [work for work in self._works if not work.has_ended]
            self._next = min((work.expiry for work in self._works), default=float("inf"))
            pause = self._next - time.monotonic()
            if self._tearing_down:
                pause = min(pause, TEARDOWN_INTERVAL)
            if not self._close_reason and pause > 0.0:
                # `wait` refuses an infinite timeout, which is what no operation and no release
                # means.
                self._changed.wait(pause if pause < threading.TIMEOUT_MAX else None)
            return not self._close_reason

    def _round(self) -> None:
        # Works are polled and failed outside the lock: that calls the device and the communicator.
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
            self._close_reason = self._close_reason or reason
            works, self._works = self._works, []
            self._changed.notify()
        for work in works:
            work.fail(reason)
