"""Graphs as lists of verbs, issued again at each replay."""

from collections.abc import Callable

from equipoise.backends.cpu.stream import Verb, own_stream
from equipoise.hal.stream import Stream


class CpuGraph:
    """What was captured; empty at first, and after a capture that raised as it was before.

    A replay issues the verbs anew: events are recorded again, lock words and slots are taken in
    turn again, leases are looked at again. It is one launch: another thread's commit comes before
    all of it or after all of it (clause V4).
    """

    def __init__(self) -> None:
        self._verbs: tuple[Verb, ...] = ()

    def capture(self, stream: Stream, program: Callable[[], object]) -> None:
        """Keep what `program` launches on `stream` from this thread, without running it."""
        self._verbs = own_stream(stream).capture(program)

    def replay(self, stream: Stream) -> None:
        """Launch what was kept, on this stream or another."""
        own_stream(stream).issue(*self._verbs)
