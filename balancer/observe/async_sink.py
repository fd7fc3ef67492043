"""Carries events from the serving threads to the event sinks, on a thread of its own.

    step thread, workers --emit--> bounded queue --sink thread--> aggregator --> each sink

Each sink receives every event and the events derived from it (`balancer/observe/aggregator.py`).

`emit` never waits: an event that does not fit into the queue is dropped and counted. A sink that
raises is logged once and counted each time, and still receives the next event: no fault of a sink
reaches the serving threads.
"""

import logging
import threading
from collections.abc import Sequence
from queue import SimpleQueue

from equipoise.balancer.experts.runtime.events import Event, EventsDropped, EventSink
from equipoise.balancer.observe.aggregator import EventAggregator

QUEUE_CAPACITY = 65_536
"""Maximum number of queued events: minutes of serving."""
LOG = logging.getLogger(__name__)


class _EndOfQueue:
    """Marks the end of the queue."""


class AsyncEventSink:
    """An event sink that forwards events to other sinks, on a thread of its own.

    One engine has one: what the aggregator derives depends on the events of the same engine.

    Args:
        sinks: receive every event in order, called by that thread only.
        capacity: maximum number of queued events.
    """

    def __init__(self, sinks: Sequence[EventSink], capacity: int = QUEUE_CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be positive, got {capacity}")
        self._sinks = tuple(sinks)
        self._capacity = capacity
        self._aggregator = EventAggregator()
        self._queue: SimpleQueue[Event | _EndOfQueue] = SimpleQueue()
        self._failed_parts: set[int] = set()
        self._dropped_reported = 0
        self._open = True
        self.dropped = 0
        """Events that were dropped because the queue was full, or the sink closed."""
        self.failures = 0
        """Events for which a sink or the aggregator raised."""
        # A daemon: a sink that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="equipoise.events", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        """Queues `event` and returns at once; callable from any thread."""
        # Without a lock, several threads may see the last free place: the queue may then exceed
        # its capacity by as many events as there are threads. A lock would be one that serving
        # waits for.
        if not self._open or self._queue.qsize() >= self._capacity:
            self.dropped += 1
            return
        self._queue.put(event)

    def close(self, timeout: float = 5.0) -> None:
        """Forwards what is queued, then closes the sinks; waits at most `timeout` seconds."""
        if self._open:
            self._open = False
            self._queue.put(_EndOfQueue())
        self._thread.join(timeout)
        if self._thread.is_alive():
            LOG.warning("event sinks did not keep up: %d events are left", self._queue.qsize())

    def _run(self) -> None:
        while not isinstance(event := self._queue.get(), _EndOfQueue):
            self._report_dropped()
            self._emit_to_sinks(event)
            self._emit_derived(event)
        self._report_dropped()
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                self._count_failure(sink, error)

    def _emit_derived(self, event: Event) -> None:
        try:
            following = self._aggregator.process(event)
        except Exception as error:
            self._count_failure(self._aggregator, error)
            return
        for derived in following:
            self._emit_to_sinks(derived)

    def _emit_to_sinks(self, event: Event) -> None:
        for sink in self._sinks:
            try:
                sink.emit(event)
            except Exception as error:
                self._count_failure(sink, error)

    def _count_failure(self, part: EventSink | EventAggregator, error: Exception) -> None:
        self.failures += 1
        # One traceback for each sink: one that fails once tends to fail for every event.
        if id(part) not in self._failed_parts:
            self._failed_parts.add(id(part))
            name = type(part).__name__
            LOG.error("%s failed; further failures are only counted", name, exc_info=error)

    def _report_dropped(self) -> None:
        newly_dropped = self.dropped - self._dropped_reported
        if not newly_dropped:
            return
        if not self._dropped_reported:
            LOG.warning("event sinks do not keep up: events are dropped and counted")
        self._dropped_reported += newly_dropped
        self._emit_to_sinks(EventsDropped(newly_dropped))
