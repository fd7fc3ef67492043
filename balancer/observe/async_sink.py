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
        self._journals = tuple(journals)
        self._capacity = capacity
        self._digest = EventAggregator()
        self._queue: SimpleQueue[Event | _EndOfQueue] = SimpleQueue()
        self._reported: set[int] = set()
        self._told = 0
        self._open = True
        self.lost = 0
        """Entries that were dropped."""
        self.failures = 0
        """Entries that a journal could not take."""
        self._thread = threading.Thread(target=self._carry, name="equipoise.courier", daemon=True)
        self._thread.start()

    def emit(self, entry: Event) -> None:
        """Hand `entry` on; from any thread, at once."""
        # Several threads may find the last place free at a time: the bound is soft by so many.
        if not self._open or self._queue.qsize() >= self._capacity:
            self.lost += 1
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

    def _carry(self) -> None:
        while not isinstance(entry := self._queue.get(), _EndOfQueue):
            self._tell_of_losses()
            self._hand(entry)
            self._hand_on(entry)
        self._tell_of_losses()
        for journal in self._journals:
            try:
                journal.close()
            except Exception as error:
                self._fail(journal, error)

    def _hand_on(self, entry: Event) -> None:
        """What follows from `entry`."""
        try:
            following = self._digest.read(entry)
        except Exception as error:
            self._fail(self._digest, error)
            return
        for derived in following:
            self._hand(derived)

    def _hand(self, entry: Event) -> None:
        for journal in self._journals:
            try:
                journal.emit(entry)
            except Exception as error:
                self._fail(journal, error)

    def _fail(self, part: EventSink | EventAggregator, error: Exception) -> None:
        self.failures += 1
        if id(part) not in self._reported:
            self._reported.add(id(part))
            name = type(part).__name__
            LOG.error("%s failed; further failures are only counted", name, exc_info=error)

    def _tell_of_losses(self) -> None:
        lost = self.lost - self._told
        if not lost:
            return
        if not self._told:
            LOG.warning("journals do not keep up: entries are dropped, and counted")
        self._told += lost
        self._hand(EventsDropped(lost))
