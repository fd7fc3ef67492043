"""How long a wait may last."""

import threading
import time


class Patience:
    """Until a moment of the monotonic clock, or until somebody gives up.

    Args:
        expiry: the moment.
        given_up: set when nobody wants the outcome any more.
    """

    def __init__(self, expiry: float, given_up: threading.Event) -> None:
        self._expiry = expiry
        self._given_up = given_up

    @property
    def left(self) -> float:
        """Seconds that are left, not below zero."""
        if self._given_up.is_set():
            return 0.0
        return max(self._expiry - time.monotonic(), 0.0)
