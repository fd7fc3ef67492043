"""Which requests a Gantt chart shows, and in which lanes."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from equipoise.report.routed.trips import Routed, Trip

MOST_WORKERS = 8
"""That are drawn: more would be a carpet."""
MOST_REQUESTS = 480


@dataclass(frozen=True)
class Excerpt:
    """Requests that arrived one after the other, and the workers that had them.

    Attributes:
        workers: names.
        lanes: of each worker, lanes of requests that do not overlap.
        whole: whether these are all requests that any worker had.
        begin: when the first of them arrived.
    """

    workers: tuple[str, ...]
    lanes: tuple[tuple[tuple[Trip, ...], ...], ...]
    whole: bool
    begin: float


def excerpt_of(routed: Routed) -> Excerpt | None:
    """Those in the middle, where there are more than can be drawn; None where there are none."""
    workers = routed.workers[:MOST_WORKERS]
    shown = set(workers)
    known = sorted(
        (trip for trip in routed.bound if trip.worker in shown), key=lambda trip: trip.arrival
    )
    if not known:
        return None
    skipped = max(0, len(known) - MOST_REQUESTS) // 2
    middle = known[skipped : skipped + MOST_REQUESTS]
    lanes = tuple(packed([t for t in middle if t.worker == worker]) for worker in workers)
    return Excerpt(workers, lanes, len(middle) == len(routed.bound), middle[0].arrival)


def packed(trips: Sequence[Trip]) -> tuple[tuple[Trip, ...], ...]:
    """In as few lanes as can be: each request takes the lane that is free first."""
    lanes: list[list[Trip]] = []
    free: list[tuple[float, int]] = []
    for trip in sorted(trips, key=lambda one: one.arrival):
        if free and free[0][0] <= trip.arrival:
            lane = heappop(free)[1]
        else:
            lane = len(lanes)
            lanes.append([])
        lanes[lane].append(trip)
        heappush(free, (trip.end, lane))
    return tuple(map(tuple, lanes))
