"""Carries entries from the threads that serve to the journals that write, and never waits.

    step thread, workers --note--> bounded queue --courier's thread--> digest --> each journal

The journals are told each entry, and what it comes to (`balancer/observe/aggregator.py`).

What does not fit into the queue is dropped and counted. A journal that raises is reported once,
counted each time, and told the next entry all the same: nothing that it does reaches serving.
"""

import logging
import threading
from collections.abc import Sequence
from queue import SimpleQueue

from equipoise.balancer.experts.runtime.events import Event, EventsDropped, EventSink
from equipoise.balancer.observe.aggregator import EventAggregator

QUEUE_CAPACITY = 65_536
"""Entries that wait at most: minutes of serving."""
LOG = logging.getLogger(__name__)


class _EndOfQueue:
    """The last thing in the queue."""


class AsyncEventSink:
    """A journal that hands entries on to others, on a thread of its own.

    Args:
        journals: told everything, in order, by that thread.
        capacity: entries that wait at most.
    """

    def __init__(self, journals: Sequence[EventSink], capacity: int = QUEUE_CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be positive, got {capacity}")
        self._sinks = tuple(journals)
        self._capacity = capacity
        self._aggregator = EventAggregator()
        self._queue: SimpleQueue[Event | _EndOfQueue] = SimpleQueue()
        self._failed_parts: set[int] = set()
        self._dropped_reported = 0
        self._open = True
        self.dropped = 0
        """Entries that were dropped."""
        self.failures = 0
        """Entries that a journal could not take."""
        self._thread = threading.Thread(target=self._run, name="equipoise.courier", daemon=True)
        self._thread.start()

    def emit(self, entry: Event) -> None:
        """Hand `entry` on; from any thread, at once."""
        # Several threads may find the last place free at a time: the bound is soft by so many.
        if not self._open or self._queue.qsize() >= self._capacity:
            self.dropped += 1
            return
        self._queue.put(entry)

    def close(self, timeout: float = 5.0) -> None:
        """Hand on what waits, then close the journals; at most `timeout` seconds."""
        if self._open:
            self._open = False
            self._queue.put(_EndOfQueue())
        self._thread.join(timeout)
        if self._thread.is_alive():
            LOG.warning("journals did not keep up: %d entries are left", self._queue.qsize())

    def _run(self) -> None:
        while not isinstance(entry := self._queue.get(), _EndOfQueue):
            self._report_dropped()
            self._emit_to_sinks(entry)
            self._emit_derived(entry)
        self._report_dropped()
        for journal in self._sinks:
            try:
                journal.close()
            except Exception as error:
                self._count_failure(journal, error)

    def _emit_derived(self, entry: Event) -> None:
        """What follows from `entry`."""
        try:
            following = self._aggregator.process(entry)
        except Exception as error:
            self._count_failure(self._aggregator, error)
            return
        for derived in following:
            self._emit_to_sinks(derived)

    def _emit_to_sinks(self, entry: Event) -> None:
        for journal in self._sinks:
            try:
                journal.emit(entry)
            except Exception as error:
                self._count_failure(journal, error)

    def _count_failure(self, part: EventSink | EventAggregator, error: Exception) -> None:
        self.failures += 1
        if id(part) not in self._failed_parts:
            self._failed_parts.add(id(part))
            name = type(part).__name__
            LOG.error("%s failed; further failures are only counted", name, exc_info=error)

    def _report_dropped(self) -> None:
        lost = self.dropped - self._dropped_reported
        if not lost:
            return
        if not self._dropped_reported:
            LOG.warning("journals do not keep up: entries are dropped, and counted")
        self._dropped_reported += lost
        self._emit_to_sinks(EventsDropped(lost))
