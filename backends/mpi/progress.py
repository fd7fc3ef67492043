"""The thread that drives MPI on.

MPI makes no reliable progress by itself: a large message moves only while somebody calls into the
library. So one thread a fabric tests whatever is under way. Several ranks share a core, so it
sleeps while nothing is, and longer and longer while nothing ends.
"""

import threading
import time

from equipoise.backends.mpi.flight import Flight

EAGER = 0.0001
"""Seconds without an end before the thread starts to pause."""
SHARE = 0.1
"""A pause is this part of the time since something last began or ended, and costs little of it."""
LONGEST = 0.001
"""Seconds of a pause while somebody may be waiting."""
QUARANTINE = 0.05
"""Seconds of a pause while only operations that nobody waits for any more are left."""


class Progress:
    """Flights under way, and the thread that polls them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._flights: list[Flight] = []
        self._moved = time.monotonic()
        self._closed = ""
        self._thread = threading.Thread(target=self._run, name="equipoise.mpi", daemon=True)
        self._thread.start()

    def add(self, flight: Flight) -> None:
        """Take over a flight; its work fails at once when the thread has ended."""
        with self._changed:
            self._flights.append(flight)  # even then: its buffers are MPI's
            self._moved = time.monotonic()
            if self._closed:
                flight.work.fail(self._closed)
            self._changed.notify()

    def stop(self, timeout: float) -> tuple[Flight, ...]:
        """End the thread, within `timeout` seconds, and what is under way, with an error.

        Returns the flights that MPI has not let go of: they must be kept for ever.
        """
        self._shut("was closed")
        self._thread.join(timeout)
        return tuple(self._flights)

    def _run(self) -> None:
        try:
            while self._await():
                self._round()
        except BaseException as error:
            self._shut(f"lost its progress thread: {error!r}")
            raise

    def _await(self) -> bool:
        """Sleep until there is something to poll; false when there never will be."""
        with self._changed:
            while not self._flights and not self._closed:
                self._changed.wait()
            pause = self._pause()
            if pause and not self._closed:
                self._changed.wait(pause)
            return not self._closed

    def _pause(self) -> float:
        waited = time.monotonic() - self._moved
        if waited < EAGER:
            return 0.0
        if all(flight.work.done() for flight in self._flights):
            return QUARANTINE
        return min(SHARE * waited, LONGEST)

    def _round(self) -> None:
        with self._changed:
            flights = tuple(self._flights)
        landed = {id(flight) for flight in flights if flight.poll()}
        with self._changed:
            self._flights = [flight for flight in self._flights if id(flight) not in landed]
            if landed:
                self._moved = time.monotonic()

    def _shut(self, why: str) -> None:
        with self._changed:
            self._closed = self._closed or why
            flights = tuple(self._flights)
            self._changed.notify()
        for flight in flights:
            flight.work.fail(why)
