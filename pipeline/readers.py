"""Waiting for whoever reads a buffer to let go of it."""

import threading
import time
from collections.abc import Callable

from equipoise.hal.errors import BuffersHeld
from equipoise.pipeline.edge import Edge

LOOK = 0.0005
"""Seconds between two looks whether the tensors over a buffer are gone: nobody tells when."""

SELDOM = 200
"""Looks from one question to the stream, whether it has failed, to the next: each has a place in
the stream's queue."""


class Readers:
    """Of an end's buffers.

    Args:
        edge: whose end it is.
    """

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._changed = threading.Event()
        self._alive = edge.accelerator.event()

    def stir(self) -> None:
        """Somebody may have let go."""
        self._changed.set()

    def wait(self, over: Callable[[], bool], holder: Callable[[], str]) -> None:
        """Block until `over`, for the edge's deadline at most.

        Raises:
            BuffersHeld: it is not over by then; `holder` says who is not through.
            StreamFailed: the edge's stream failed: what it ran keeps what it read.
        """
        if over():
            return
        began = time.monotonic_ns()
        expiry = time.monotonic() + self._edge.deadline
        looks = 0
        while not over():
            if time.monotonic() >= expiry:
                raise BuffersHeld(holder())
            if looks % SELDOM == 0:
                self._edge.stream.record(self._alive)  # raises where the stream has failed
            looks += 1
            self._changed.wait(LOOK)
            self._changed.clear()
        self._edge.meter.held(time.monotonic_ns() - began)
