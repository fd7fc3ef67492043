"""A run as a trace that Perfetto and Chrome open: a process a rank, a thread a stream or worker.

The format is the JSON object of Chrome's "Trace Event Format": complete events (`X`), counters
(`C`) and metadata (`M`); times are microseconds from the first event.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from equipoise.balancer.experts.runtime.events import Track
from equipoise.balancer.observe.trace_buffer import ImbalanceSample, RecordedSpan
from equipoise.demo.run_record import RunRecord

MICRO = 1e6
TRACKS = tuple(Track)
"""Threads of a process, in the order in which they are shown."""
CLOCK = "each rank's monotonic clock, brought to its wall clock once, at the start"

Event = dict[str, object]


def render_trace(record: RunRecord) -> str:
    """The whole file as text; of a run without balancing it has steps and boundaries only."""
    about = {"equipoise": record.version, "shares": record.shares}
    return trace_of(record.spans, record.levels, about)


def trace_of(
    spans: Sequence[RecordedSpan],
    levels: Sequence[ImbalanceSample],
    about: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """What the span books of one engine have kept, of any number of ranks, as the text of a file.

    Args:
        spans: in any order.
        levels: likewise.
        about: words on where it comes from, shown by the viewer.
    """
    origin = min((span.begin for span in spans), default=0.0)
    events = [
        *_metadata(spans),
        *(_complete(span, origin) for span in sorted(spans, key=_outer_first)),
        *_counters(levels, origin),
    ]
    whole = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {**about, "clock": CLOCK},
    }
    return json.dumps(whole, allow_nan=False)


def _outer_first(span: RecordedSpan) -> tuple[float, float]:
    """Of two that begin together the longer one encloses the other."""
    return span.begin, -span.end


def _metadata(spans: Sequence[RecordedSpan]) -> Iterable[Event]:
    """Names, and the order in which they are shown."""
    for rank in sorted({span.rank for span in spans}):
        yield _metadata_event("process_name", rank, 0, {"name": f"rank {rank}"})
        yield _metadata_event("process_sort_index", rank, 0, {"sort_index": rank})
    for rank, track in sorted({(span.rank, _thread(span.track)) for span in spans}):
        yield _metadata_event("thread_name", rank, track, {"name": str(TRACKS[track])})
        yield _metadata_event("thread_sort_index", rank, track, {"sort_index": track})


def _metadata_event(name: str, rank: int, track: int, arguments: Event) -> Event:
    return {"name": name, "ph": "M", "pid": rank, "tid": track, "args": arguments}


def _complete(span: RecordedSpan, origin: float) -> Event:
    # Both ends are rounded alike, so that what borders on something else goes on doing so.
    begin, end = _micro(span.begin - origin), _micro(span.end - origin)
    return {
        "name": span.name,
        "cat": span.track,
        "ph": "X",
        "ts": begin,
        "dur": max(end - begin, 0.0),
        "pid": span.rank,
        "tid": _thread(span.track),
        "args": span.details,
    }


def _counters(levels: Iterable[ImbalanceSample], origin: float) -> Iterable[Event]:
    """The imbalance by sub-window, as a curve above the rank that saw it."""
    for level in levels:
        if math.isfinite(level.imbalance):
            yield {
                "name": "imbalance",
                "ph": "C",
                "ts": max(_micro(level.at - origin), 0.0),
                "pid": level.rank,
                "args": {"max/mean - 1": level.imbalance},
            }


def _micro(seconds: float) -> float:
    """Microseconds, to a nanosecond."""
    return round(seconds * MICRO, 3)


def _thread(track: str) -> int:
    return TRACKS.index(Track(track))
