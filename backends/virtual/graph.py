"""Graphs as lists of verbs, issued again at each replay."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from equipoise.backends.virtual.stream import Verb, own_stream
from equipoise.hal.stream import Stream

if TYPE_CHECKING:
    from equipoise.backends.virtual.device import Device


class VirtualGraph:
    """What was captured; empty at first, and after a capture that raised as it was before.

    A replay issues the verbs anew: events are recorded again, lock words and slots are taken in
    turn again, leases are looked at again (clauses B7, O6).
    """

    def __init__(self, device: "Device") -> None:
        self._device = device
        self._verbs: tuple[Verb, ...] = ()

    def capture(self, stream: Stream, program: Callable[[], object]) -> None:
        """Keep what `program` launches on `stream`, without running it."""
        self._verbs = own_stream(stream).capture(program)

    def replay(self, stream: Stream) -> None:
        """Launch what was kept."""
        own_stream(stream).issue(*self._verbs)
