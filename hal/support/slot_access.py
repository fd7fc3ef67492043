"""What every slot store needs: hazards between operations, attached readers, and leases.

`HazardTracker` keeps the order of issue among operations that touch the same buffers on different
streams, `ReaderRegistry` orders commits against streams whose own launches read the slots, and
`LeaseTable` refuses writes to slots that a peer still reads.
"""

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from equipoise.hal.errors import SlotLeased, StreamFailed
from equipoise.hal.stream import Event, Stream


@dataclass(slots=True)
class _BufferAccess:
    """The last write of a buffer and the reads since: one event per stream."""

    writer: tuple[Stream, Event] | None = None
    readers: dict[Stream, Event] = field(default_factory=dict)


class HazardTracker:
    """Makes streams wait for each other where two calls touch one buffer and one writes (V5).

    Memory is bounded by buffers x streams. A call that is issued from inside a program counts as a
    part of that program; between the launch of such a program and its end, no other thread issues
    conflicting calls on its stream.

    Args:
        event: makes a fresh event.
    """

    def __init__(self, event: Callable[[], Event]) -> None:
        self._event = event
        self._traces: dict[Hashable, _BufferAccess] = {}
        # Held while a block launches, so that no conflicting call comes between its waits and its
        # record. Reentrant: a program that runs at its launch may issue calls of the same store.
        self._lock = threading.RLock()

    @contextmanager
    def track(
        self, stream: Stream, *, reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = ()
    ) -> Iterator[Event]:
        """Run what the block launches on `stream` after all earlier conflicting calls.

        Yields the event that is recorded at the end of the block, for other streams to wait for.
        Waits, on the stream, only for calls on other streams that have not ended. A writer that
        failed has left nothing to read: reading raises its `StreamFailed` before any side effect.
        A write continues: what it would have waited for cannot happen any more.
        """
        read_buffers, written_buffers = tuple(reads), tuple(writes)
        with self._lock:
            for event in self._conflicting(stream, read_buffers, written_buffers):
                stream.wait(event)
            done = self._event()
            try:
                yield done
            finally:  # a launch that raised may have enqueued a part of its work
                stream.record(done)
                self._note(stream, read_buffers, written_buffers, done)

    def _conflicting(
        self, stream: Stream, reads: tuple[Hashable, ...], writes: tuple[Hashable, ...]
    ) -> list[Event]:
        """The events of other streams to wait for, each once."""
        sources = self._writers(stream, reads)
        pending = [event for event in sources if not event.query()]
        for event in sources:
            if event.query():
                event.synchronize(0.0)  # raises if it ended by failing
        after = {**self._writers(stream, writes), **self._readers(stream, writes)}
        pending += [event for event in after if event not in sources and not event.query()]
        return pending

    def _writers(self, stream: Stream, buffers: tuple[Hashable, ...]) -> dict[Event, None]:
        events: dict[Event, None] = {}
        for buffer in buffers:
            trace = self._traces.get(buffer)
            if trace is not None and trace.writer is not None and trace.writer[0] is not stream:
                events[trace.writer[1]] = None
        return events

    def _readers(self, stream: Stream, buffers: tuple[Hashable, ...]) -> dict[Event, None]:
        events: dict[Event, None] = {}
        for buffer in buffers:
            trace = self._traces.get(buffer)
            if trace is not None and trace.readers:
                events.update(
                    (event, None) for at, event in trace.readers.items() if at is not stream
                )
        return events

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
                trace = self._traces[buffer] = _BufferAccess()
            trace.readers[stream] = done
        by = stream, done
        for buffer in writes:
            trace = self._traces.get(buffer)
            if trace is None:
                self._traces[buffer] = _BufferAccess(by)
                continue
            # Readers are forgotten: the write waits for them, so whoever waits for it does too.
            trace.writer = by
            trace.readers.clear()


class ReaderRegistry:
    """The attached streams of one slot store.

    A commit holds them: it runs after what they have launched, and what they launch later runs
    after it (clauses A12, V4). A stream that has failed delays no commit: it runs nothing any
    more, and says so itself at its next launch.

    Args:
        event: makes a fresh event.
    """

    def __init__(self, event: Callable[[], Event]) -> None:
        self._event = event
        self._attached: list[AttachedReader] = []
        self._detached_events: dict[Stream, Event] = {}
        self._lock = threading.Lock()

    def attach(self, stream: Stream) -> "AttachedReader":
        """A further reader on `stream`; a stream may have several."""
        reader = AttachedReader(self, stream)
        with self._lock:
            self._attached.append(reader)
        return reader

    def wait_for_readers(self, writer: Stream) -> tuple[Stream, ...]:
        """Make `writer` wait for what every other attached stream has launched so far.

        Returns these streams: `resume_readers` lets them continue.
        """
        with self._lock:
            streams = dict.fromkeys(reader.stream for reader in self._attached)
            detached_events = [
                event for at, event in self._detached_events.items() if at is not writer
            ]
            self._detached_events = {
                at: event for at, event in self._detached_events.items() if not event.query()
            }
        event_by_stream = {
            stream: self._record_event(stream) for stream in streams if stream is not writer
        }
        for event in (*detached_events, *event_by_stream.values()):
            if event is not None and not event.query():
                writer.wait(event)
        return tuple(stream for stream, event in event_by_stream.items() if event is not None)

    def resume_readers(self, streams: Iterable[Stream], done: Event) -> None:
        """Make the held streams wait for `done`, recorded after the commit."""
        for stream in streams:
            with suppress(StreamFailed):
                stream.wait(done)

    def detach(self, reader: "AttachedReader") -> None:
        """`reader` is detached; the next commit still waits for what it has launched."""
        with self._lock:
            if reader not in self._attached:
                return
            self._attached.remove(reader)
        event = self._record_event(reader.stream)
        if event is not None:
            with self._lock:
                self._detached_events[reader.stream] = event

    def _record_event(self, stream: Stream) -> Event | None:
        event = self._event()
        try:
            stream.record(event)
        except StreamFailed:
            return None
        return event


class AttachedReader:
    """A stream while it is attached."""

    def __init__(self, readers: ReaderRegistry, stream: Stream) -> None:
        self._readers = readers
        self.stream = stream

    def detach(self) -> None:
        """End the reading."""
        self._readers.detach(self)


class LeaseTable:
    """How often each slot of one store is leased; for any thread (clause A11)."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        # Held over a whole write, so that no lease starts between its check and its launch.
        # Reentrant: a program that runs at its launch may lease or release on the same thread.
        self._lock = threading.RLock()

    def acquire(self, slots: Iterable[int]) -> "SlotLease":
        """Add one lease to each of `slots`."""
        lease = SlotLease(self, tuple(slots))
        with self._lock:
            self._counts.update(lease.slots)
        return lease

    @contextmanager
    def exclude_leased(self, slots: Iterable[int]) -> Iterator[None]:
        """Prevent new leases within the block. Raises `SlotLeased` if one of `slots` is leased."""
        with self._lock:
            leased_slots = sorted({slot for slot in slots if self._counts[slot] > 0})
            if leased_slots:
                raise SlotLeased(
                    f"slot(s) {', '.join(map(str, leased_slots))} are leased to a reader"
                )
            yield

    def release(self, lease: "SlotLease") -> None:
        """End a lease, once."""
        with self._lock:
            if lease.ended:
                return
            lease.ended = True
            self._counts.subtract(lease.slots)
            self._counts = +self._counts  # drop slots without leases


class SlotLease:
    """Slots held until `release`."""

    def __init__(self, leases: LeaseTable, slots: tuple[int, ...]) -> None:
        self._leases = leases
        self._slots = slots
        self.ended = False

    @property
    def slots(self) -> tuple[int, ...]:
        """The leased slots."""
        return self._slots

    def release(self) -> None:
        """End the lease."""
        self._leases.release(self)
