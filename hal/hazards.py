"""Order of issue among verbs that touch the same buffers on different streams."""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from equipoise.hal.stream import Event, Stream


@dataclass(slots=True)
class _Trace:
    """Who last wrote a buffer, and who has read it since: one event a stream."""

    writer: tuple[Stream, Event] | None = None
    readers: dict[Stream, Event] = field(default_factory=dict)


class Hazards:
    """Makes streams wait for each other wherever two verbs touch one buffer and one writes (V5).

    Memory is bounded by buffers x streams. A verb that is issued from inside a program counts as a
    part of that program; between the launch of such a program and its end, nobody else issues
    conflicting verbs on its stream.

    Args:
        event: makes a fresh event.
    """

    def __init__(self, event: Callable[[], Event]) -> None:
        self._event = event
        self._traces: dict[Hashable, _Trace] = {}
        self._lock = threading.RLock()

    @contextmanager
    def ordered(
        self, stream: Stream, *, reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = ()
    ) -> Iterator[Event]:
        """What is launched on `stream` in the block comes behind all earlier conflicting verbs.

        Yields the event that is recorded at the end of the block, for other streams to wait for.
        Waits, on the stream, only for verbs of other streams that have not ended. A writer that
        failed has left nothing to read: reading raises its `StreamFailed` before any side effect.
        Whoever writes goes on: what it would have waited for cannot happen any more.
        """
        read, written = tuple(reads), tuple(writes)
        with self._lock:
            for event in self._ahead(stream, read, written):
                stream.wait(event)
            done = self._event()
            try:
                yield done
            finally:  # a launch that raised may have been given a part of its work
                stream.record(done)
                self._note(stream, read, written, done)

    def _ahead(
        self, stream: Stream, reads: tuple[Hashable, ...], writes: tuple[Hashable, ...]
    ) -> list[Event]:
        """The events of other streams to wait for, each once."""
        sources = self._writers(stream, reads)
        pending = [event for event in sources if not event.query()]
        for event in sources:
            if event.query():
                event.synchronize(0.0)  # raises if it ended by failing
        behind = {**self._writers(stream, writes), **self._readers(stream, writes)}
        pending += [event for event in behind if event not in sources and not event.query()]
        return pending

    def _writers(self, stream: Stream, buffers: tuple[Hashable, ...]) -> dict[Event, None]:
        found: dict[Event, None] = {}
        for buffer in buffers:
            trace = self._traces.get(buffer)
            if trace is not None and trace.writer is not None and trace.writer[0] is not stream:
                found[trace.writer[1]] = None
        return found

    def _readers(self, stream: Stream, buffers: tuple[Hashable, ...]) -> dict[Event, None]:
        found: dict[Event, None] = {}
        for buffer in buffers:
            trace = self._traces.get(buffer)
            if trace is not None and trace.readers:
                found.update(
                    (event, None) for at, event in trace.readers.items() if at is not stream
                )
        return found

    def _note(
        self,
        stream: Stream,
        reads: tuple[Hashable, ...],
        writes: tuple[Hashable, ...],
        done: Event,
    ) -> None:
        for buffer in reads:
            trace = self._traces.get(buffer)
            if trace is None:
                trace = self._traces[buffer] = _Trace()
            trace.readers[stream] = done
        by = stream, done
        for buffer in writes:
            trace = self._traces.get(buffer)
            if trace is None:
                self._traces[buffer] = _Trace(by)
                continue
            trace.writer = by
            trace.readers.clear()
