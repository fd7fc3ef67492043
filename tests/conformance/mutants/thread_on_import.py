"""A backend whose module starts a thread when it is imported; imported by its mutant alone."""

import threading

from equipoise.backends.virtual.backend import VirtualBackend

LINGER = 1.0
"""Seconds that the thread is there: longer than the look at it takes, in a fresh process."""


class WakingBackend(VirtualBackend):
    """The virtual backend, in a module that does too much."""


_timer = threading.Timer(LINGER, int)
_timer.daemon = True
_timer.start()
