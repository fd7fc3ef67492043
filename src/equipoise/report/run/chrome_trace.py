"""A run as a trace that Perfetto and Chrome open: a process a rank, a thread a stream or worker.

The format is the JSON object of Chrome's "Trace Event Format": complete events (`X`), counters
(`C`), metadata (`M`) and flows (`s`, `f`), which viewers draw as arrows: from the sender of a round
to its receiver, and from a vote to the boundary that commits. Times are microseconds from the first
event.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from equipoise.balancer.experts.runtime.events import Track
from equipoise.balancer.observe.trace_buffer import ImbalanceSample, RecordedSpan
from equipoise.demo.run_record import RunRecord

MICRO = 1e6
WITHIN = 0.001
"""Microseconds by which an arrow ends before its span does."""
TRACKS = tuple(Track)
"""Threads of a process, in the order in which they are shown."""
CLOCK = "each rank's monotonic clock, brought to its wall clock once, at the start"

Event = dict[str, object]


def render_trace(record: RunRecord) -> str:
    """The whole file as text; of a run without balancing it has steps and boundaries only."""
    about = {"equipoise": record.version, "shares": record.shares}
    return trace_of(record.spans, record.levels, about, record.ranks)


def trace_of(
    spans: Sequence[RecordedSpan],
    levels: Sequence[ImbalanceSample],
    about: Mapping[str, str] = MappingProxyType({}),
    group: int | None = None,
) -> str:
    """What the span books of one engine have kept, of any number of ranks, as the text of a file.

    Args:
        spans: in any order.
        levels: likewise.
        about: words on where it comes from, shown by the viewer.
        group: ranks that share experts: peers are counted within consecutive groups of so many;
            None where all ranks are one group.
    """
    origin = min((span.begin for span in spans), default=0.0)
    events = [
        *_metadata(spans),
        *(_complete(span, origin) for span in sorted(spans, key=_outer_first)),
        *_counters(levels, origin),
        *_flows([*_rounds(spans, group), *_commits(spans)], origin),
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


Arrow = tuple[str, RecordedSpan, RecordedSpan]
"""A name, the span that it begins in, and the one that it ends in."""


def _rounds(spans: Sequence[RecordedSpan], group: int | None) -> Iterable[Arrow]:
    """From each round that sends to the one that receives it.

    Messages of a pair of ranks keep their order, so the n-th that one sent is the n-th that the
    other got; of a pair whose spans were not all kept there is no arrow.
    """
    sent: dict[tuple[int, int], list[RecordedSpan]] = {}
    received: dict[tuple[int, int], list[RecordedSpan]] = {}
    for span in sorted(spans, key=lambda span: span.begin):
        if span.track == Track.COPY:
            first = span.rank - span.rank % group if group else 0
            if "to" in span.details:
                sent.setdefault((span.rank, first + span.details["to"]), []).append(span)
            if "from" in span.details:
                received.setdefault((first + span.details["from"], span.rank), []).append(span)
    for pair, senders in sent.items():
        receivers = received.get(pair, [])
        if len(senders) == len(receivers):
            yield from (("weights", *both) for both in zip(senders, receivers, strict=True))


def _commits(spans: Sequence[RecordedSpan]) -> Iterable[Arrow]:
    """From each vote that says commit to the boundary of its rank that does."""
    boundaries = {
        (span.rank, span.details.get("step")): span
        for span in spans
        if span.track == Track.BOUNDARY
    }
    for span in spans:
        if span.track == Track.VOTE and str(span.details.get("verdict")).startswith("Commit"):
            boundary = boundaries.get((span.rank, span.details.get("step")))
            if boundary is not None:
                yield "commit", span, boundary


def _flows(arrows: Iterable[Arrow], origin: float) -> Iterable[Event]:
    """A pair of events for each arrow that does not run back in time.

    Viewers bind an end to the span around it, so both lie within their spans.
    """
    for number, (name, first, last) in enumerate(arrows):
        begin = _micro(first.begin - origin)
        end = max(_micro(last.begin - origin), _micro(last.end - origin) - WITHIN)
        if begin <= end:
            for phase, time, span in (("s", begin, first), ("f", end, last)):
                event: Event = {"name": name, "cat": "flow", "ph": phase, "id": number, "ts": time}
                event |= {"pid": span.rank, "tid": _thread(span.track)}
                yield event | {"bp": "e"} if phase == "f" else event


def _micro(seconds: float) -> float:
    """Microseconds, to a nanosecond."""
    return round(seconds * MICRO, 3)


def _thread(track: str) -> int:
    return TRACKS.index(Track(track))
