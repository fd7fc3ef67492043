"""Streams whose own launches read the slots, and that must see a commit whole."""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from equipoise.hal.errors import StreamFailed
from equipoise.hal.stream import Event, Stream


class Readers:
    """The attached streams of one slot store.

    A commit holds them: it comes behind what they have launched, and what they launch later comes
    behind it (clauses A12, V4). A stream that has failed holds nobody up: it runs nothing any
    more, and says so itself at its next launch.

    Args:
        event: makes a fresh event.
    """

    def __init__(self, event: Callable[[], Event]) -> None:
        self._event = event
        self._attached: list[AttachedReader] = []
        self._left: dict[Stream, Event] = {}
        self._lock = threading.Lock()

    def attach(self, stream: Stream) -> "AttachedReader":
        """A further reader on `stream`; a stream may have several."""
        reader = AttachedReader(self, stream)
        with self._lock:
            self._attached.append(reader)
        return reader

    def hold(self, writer: Stream) -> tuple[Stream, ...]:
        """Make `writer` wait for what every other attached stream has launched so far.

        Returns these streams: `follow` lets them go on.
        """
        with self._lock:
            streams = dict.fromkeys(reader.stream for reader in self._attached)
            left = [event for at, event in self._left.items() if at is not writer]
            self._left = {at: event for at, event in self._left.items() if not event.query()}
        held = {stream: self._recorded(stream) for stream in streams if stream is not writer}
        for event in (*left, *held.values()):
            if event is not None and not event.query():
                writer.wait(event)
        return tuple(stream for stream, event in held.items() if event is not None)

    def follow(self, held: Iterable[Stream], done: Event) -> None:
        """Make the held streams wait for `done`, recorded behind the commit."""
        for stream in held:
            with suppress(StreamFailed):
                stream.wait(done)

    def leave(self, reader: "AttachedReader") -> None:
        """`reader` is detached; the next commit still waits for what it has launched."""
        with self._lock:
            if reader not in self._attached:
                return
            self._attached.remove(reader)
        event = self._recorded(reader.stream)
        if event is not None:
            with self._lock:
                self._left[reader.stream] = event

    def _recorded(self, stream: Stream) -> Event | None:
        event = self._event()
        try:
            stream.record(event)
        except StreamFailed:
            return None
        return event


class AttachedReader:
    """A stream as long as it is attached."""

    def __init__(self, readers: Readers, stream: Stream) -> None:
        self._readers = readers
        self.stream = stream

    def detach(self) -> None:
        """It reads no more."""
        self._readers.leave(self)
