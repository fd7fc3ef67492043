"""Bounded waiting: the vendor's own waits know no time-out."""

import time
from collections.abc import Callable

SPIN = 50e-6
"""Seconds of looks without a pause: a sleep of any length costs as much, and a look behind the end
of a layer's hand-over would come up to a millisecond late."""
SHORTEST = 20e-6
LONGEST = 1e-3
"""Seconds between two looks; they double."""


def poll(ready: Callable[[], bool], timeout: float) -> bool:
    """Look until `ready`; whether it was within `timeout` seconds. Looks once at least."""
    began, pause = time.monotonic(), SHORTEST
    while not ready():
        waited = time.monotonic() - began
        if waited >= timeout:
            return False
        if waited >= SPIN:
            time.sleep(min(pause, timeout - waited))
            pause = min(2 * pause, LONGEST)
    return True
