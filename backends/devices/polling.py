"""Bounded waiting: the vendor's own waits know no time-out."""

import time
from collections.abc import Callable

SHORTEST = 20e-6
LONGEST = 1e-3
"""Seconds between two looks; they double."""


def poll(ready: Callable[[], bool], timeout: float) -> bool:
    """Look until `ready`; whether it was within `timeout` seconds. Looks once at least."""
    expiry, pause = time.monotonic() + timeout, SHORTEST
    while not ready():
        left = expiry - time.monotonic()
        if left <= 0.0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST)
    return True
