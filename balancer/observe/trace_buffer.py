"""Keeps the spans and imbalance samples of one rank, from which traces and charts are drawn."""

from collections import deque
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import Any

import numpy as np

from equipoise.balancer.experts.runtime.events import (
    BalanceMeasured,
    BoundaryDone,
    Event,
    RebalanceEnded,
    RebalanceMeasured,
    RebalanceRecord,
    TraceSpan,
    Track,
)

MAX_SPANS = 20_000
"""Maximum number of spans kept per rank: the last ones. It bounds memory over a long run."""


@dataclass(frozen=True)
class RecordedSpan:
    """A span of time on a track of a rank.

    Attributes:
        begin: wall-clock time in seconds.
        end: wall-clock time in seconds.
        details: values that JSON can hold.
    """

    rank: int
    track: str
    name: str
    begin: float
    end: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ImbalanceSample:
    """The imbalance of a sub-window, at the wall-clock time in seconds when it was measured."""

    rank: int
    at: float
    imbalance: float


@dataclass(frozen=True)
class SlotCopy:
    """An expert that a rank got, and did not hold before.

    Attributes:
        from_rank: position of the rank that sent it; None if it came from the host's memory.
        to_rank: position of the rank that got it.
    """

    layer: int
    expert: int
    from_rank: int | None
    to_rank: int


def slot_copies(event: RebalanceEnded) -> tuple[SlotCopy, ...]:
    """Returns the committed copies of a rebalance, by layer, expert and receiving rank."""
    (before, after), shape = event.placements, event.shape
    size = shape.slots_per_rank
    layers, slots, sources = (column.tolist() for column in event.reads)
    source_of = dict(zip(zip(layers, slots, strict=True), sources, strict=True))
    copies = []
    for layer, slot in np.argwhere(before != after).tolist():
        expert, rank = int(after[layer, slot]), slot // size
        if expert >= 0 and expert not in before[layer, rank * size : (rank + 1) * size]:
            source = source_of.get((layer, slot))
            copies.append(SlotCopy(layer, expert, None if source is None else source // size, rank))
    return tuple(sorted(copies, key=lambda one: (one.layer, one.expert, one.to_rank)))


def wall_clock_offset() -> float:
    """Returns the seconds by which the wall clock is ahead of the clock of events.

    Read once per trace: an adjustment of the wall clock during a run must not bend it. Ranks of one
    machine agree to about a microsecond, machines as well as their wall clocks do.
    """
    readings = []
    # The reading with the least time between the two clocks has the least error; nine are enough
    # for one without a context switch.
    for _ in range(9):
        before, wall, after = perf_counter(), time(), perf_counter()
        readings.append((after - before, wall - (before + after) / 2))
    return min(readings)[1]


class TraceBuffer:
    """An event sink that keeps spans, imbalance samples and records of rebalances.

    Args:
        rank: the rank whose events it receives.
        max_spans: number of spans kept; older ones are dropped and counted.
    """

    def __init__(self, rank: int, max_spans: int = MAX_SPANS) -> None:
        self._rank = rank
        self._clock_offset = wall_clock_offset()
        self._spans: deque[RecordedSpan] = deque(maxlen=max_spans)
        self._imbalance_samples: deque[ImbalanceSample] = deque(maxlen=max_spans)
        self.spans_dropped = 0
        self.copies: dict[int, tuple[SlotCopy, ...]] = {}
        """Copies of the last rebalances, by number, oldest first."""
        self.rebalances: deque[RebalanceRecord] = deque(maxlen=max_spans)
        """Records of the rebalances, in order."""

    @property
    def spans(self) -> tuple[RecordedSpan, ...]:
        """The kept spans, in the order in which they ended."""
        return tuple(self._spans)

    @property
    def imbalance_samples(self) -> tuple[ImbalanceSample, ...]:
        """The kept samples, in order."""
        return tuple(self._imbalance_samples)

    def emit(self, event: Event) -> None:
        """Implements `EventSink`."""
        match event:
            case TraceSpan(name, track, begin, end, details):
                self._append(track, name, begin, end, dict(details))
            case BoundaryDone(step, begin, end):
                self._append(Track.BOUNDARY, "boundary", begin, end, {"step": step})
            case BalanceMeasured():
                self._imbalance_samples.append(
                    ImbalanceSample(self._rank, event.at + self._clock_offset, event.imbalance)
                )
            case RebalanceEnded():
                self._keep_copies(event)
            case RebalanceMeasured(record):
                self.rebalances.append(record)

    def close(self) -> None:
        """Does nothing: the spans stay readable."""

    def _keep_copies(self, event: RebalanceEnded) -> None:
        self.copies[event.record.number] = slot_copies(event)
        if len(self.copies) > (self._spans.maxlen or 0):
            del self.copies[next(iter(self.copies))]

    def _append(
        self, track: Track, name: str, begin: float, end: float, details: dict[str, Any]
    ) -> None:
        # Counted first: the deque drops its oldest span silently.
        if len(self._spans) == self._spans.maxlen:
            self.spans_dropped += 1
        begin, end = begin + self._clock_offset, end + self._clock_offset
        self._spans.append(RecordedSpan(self._rank, str(track), name, begin, end, details))
