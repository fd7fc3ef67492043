"""A point that is reached once, and threads that wait for it."""

import threading


class Latch:
    """What `threading.Event` is, but for `clear`; several are made a step, and an event is a
    condition, a lock and a list, and one lock more for every wait."""

    __slots__ = ("_gate", "_open", "_token")

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()
        self._open = False
        self._token = [True]

    def is_set(self) -> bool:
        """Whether the point was reached."""
        return self._open

    def set(self) -> None:
        """It is reached; any thread may say so, and say it again."""
        try:
            self._token.pop()  # by one thread only
        except IndexError:
            return
        self._open = True
        self._gate.release()

    def wait(self, timeout: float) -> bool:
        """Block until it is reached, for `timeout` seconds at most; whether it was."""
        if self._open:
            return True
        if not self._gate.acquire(timeout=min(max(timeout, 0.0), threading.TIMEOUT_MAX)):
            return self._open
        self._gate.release()
        return True
