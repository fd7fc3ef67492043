"""Keeps what one rank did, when, and on which track: what a trace and a Gantt chart are made of."""

from collections import deque
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import Any

from equipoise.balancer.experts.runtime.events import (
    BalanceMeasured,
    BoundaryDone,
    Event,
    RebalanceMeasured,
    RebalanceRecord,
    TraceSpan,
    Track,
)

MAX_SPANS = 20_000
"""Spans that are kept of a rank, the last ones."""


@dataclass(frozen=True)
class RecordedSpan:
    """A span of a rank.

    Attributes:
        begin: seconds of the wall clock.
        end: likewise.
        details: numbers and words, as JSON has them.
    """

    rank: int
    track: str
    name: str
    begin: float
    end: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ImbalanceSample:
    """The imbalance that was seen at a time."""

    rank: int
    at: float
    imbalance: float


def wall_clock_offset() -> float:
    """Seconds that the wall clock is ahead of the journal's clock, read once for a whole trace.

    Of several readings the one with the least time between: within a machine all ranks then agree
    to a microsecond or so; between machines as well as their wall clocks do.
    """
    readings = []
    for _ in range(9):
        before, wall, behind = perf_counter(), time(), perf_counter()
        readings.append((behind - before, wall - (before + behind) / 2))
    return min(readings)[1]


class TraceBuffer:
    """A journal that keeps spans.

    Args:
        rank: whose they are.
        most: spans that are kept; older ones are forgotten, and counted.
    """

    def __init__(self, rank: int, most: int = MAX_SPANS) -> None:
        self._rank = rank
        self._clock_offset = wall_clock_offset()
        self._spans: deque[RecordedSpan] = deque(maxlen=most)
        self._imbalance_samples: deque[ImbalanceSample] = deque(maxlen=most)
        self.spans_dropped = 0
        self.rebalances: deque[RebalanceRecord] = deque(maxlen=most)
        """What is known of each epoch, in order."""

    @property
    def spans(self) -> tuple[RecordedSpan, ...]:
        """In the order in which they ended."""
        return tuple(self._spans)

    @property
    def imbalance_samples(self) -> tuple[ImbalanceSample, ...]:
        """In order."""
        return tuple(self._imbalance_samples)

    def emit(self, entry: Event) -> None:
        """See `StatLogger`."""
        match entry:
            case TraceSpan(name, track, begin, end, details):
                self._append(track, name, begin, end, dict(details))
            case BoundaryDone(step, begin, end):
                self._append(Track.BOUNDARY, "boundary", begin, end, {"step": step})
            case BalanceMeasured():
                self._imbalance_samples.append(
                    ImbalanceSample(self._rank, entry.at + self._clock_offset, entry.imbalance)
                )

            case RebalanceMeasured(record):
                self.rebalances.append(record)

    def close(self) -> None:
        """What was kept stays."""

    def _append(
        self, track: Track, name: str, begin: float, end: float, details: dict[str, Any]
    ) -> None:
        if len(self._spans) == self._spans.maxlen:
            self.spans_dropped += 1
        begin, end = begin + self._clock_offset, end + self._clock_offset
        self._spans.append(RecordedSpan(self._rank, str(track), name, begin, end, details))
