"""Slots that peers read, and that nobody may write meanwhile."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from equipoise.hal.errors import SlotLeased


class Leases:
    """How often each slot of one store is leased; for any thread (clause A11)."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._lock = threading.RLock()

    def take(self, slots: Iterable[int]) -> "SlotLease":
        """Hold `slots` once more each."""
        lease = SlotLease(self, tuple(slots))
        with self._lock:
            self._counts.update(lease.slots)
        return lease

    @contextmanager
    def barred(self, slots: Iterable[int]) -> Iterator[None]:
        """Nobody leases anything within the block. Raises `SlotLeased` if one of `slots` is."""
        with self._lock:
            held = sorted({slot for slot in slots if self._counts[slot] > 0})
            if held:
                raise SlotLeased(f"slot(s) {', '.join(map(str, held))} are leased to a reader")
            yield

    def end(self, lease: "SlotLease") -> None:
        """Give a lease's slots back, once."""
        with self._lock:
            if lease.ended:
                return
            lease.ended = True
            self._counts.subtract(lease.slots)
            self._counts = +self._counts  # forget what nobody holds


class SlotLease:
    """Slots held until `release`."""

    def __init__(self, leases: Leases, slots: tuple[int, ...]) -> None:
        self._leases = leases
        self._slots = slots
        self.ended = False

    @property
    def slots(self) -> tuple[int, ...]:
        """What is held."""
        return self._slots

    def release(self) -> None:
        """The reader has read."""
        self._leases.end(self)
