"""A run as a trace."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from helpers.harnesses.trace_format import faults
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipoise.balancer.experts.runtime.events import Track
from equipoise.balancer.observe.trace_buffer import ImbalanceSample, RecordedSpan
from equipoise.demo.run_record import RunRecord
from equipoise.report.run.chrome_trace import render_trace, trace_of

TRACK = str(Track.REBALANCE)


MakeRecord = Callable[..., RunRecord]
START = 1.7e9
"""Seconds of a wall clock."""
SPANS = (
    RecordedSpan(0, TRACK, "planning", START + 1.0, START + 1.5, {TRACK: 3}),
    RecordedSpan(
        0, TRACK, f"{TRACK} 3: committed", START + 1.0, START + 2.0, {TRACK: 3, "copies": 2}
    ),
    RecordedSpan(0, "transfer", "move", START + 1.5, START + 1.75, {"layers": [0, 2]}),
    RecordedSpan(1, "compute stream", "step", START, START + 0.25, {"step": 7}),
)


def trace_json_of(record: RunRecord) -> Any:
    return json.loads(render_trace(record), parse_constant=lambda word: pytest.fail(word))


def events(trace: Any, phase: str) -> list[Any]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_trace_maps_ranks_to_processes_and_tracks_to_threads(
    make_record: MakeRecord,
) -> None:
    trace = trace_json_of(make_record(spans=SPANS))
    assert faults(trace) == []
    names = {
        (event["pid"], event["tid"], event["args"]["name"])
        for event in events(trace, "M")
        if event["name"] == "thread_name"
    }
    assert {(rank, name) for rank, _, name in names} == {
        (0, TRACK),
        (0, "transfer"),
        (1, "compute stream"),
    }
    assert [e["args"]["name"] for e in events(trace, "M") if e["name"] == "process_name"] == [
        "rank 0",
        "rank 1",
    ]


def test_trace_times_are_microseconds_from_first_event(make_record: MakeRecord) -> None:
    trace = trace_json_of(make_record(spans=SPANS))
    times = {event["name"]: (event["ts"], event["dur"]) for event in events(trace, "X")}
    assert times["step"] == pytest.approx((0.0, 250_000.0), abs=1.0)
    assert times["move"] == pytest.approx((1_500_000.0, 250_000.0), abs=1.0)
    (move,) = [event for event in events(trace, "X") if event["name"] == "move"]
    assert move["args"] == {"layers": [0, 2]}


def test_trace_orders_enclosing_spans_first(make_record: MakeRecord) -> None:
    names = [event["name"] for event in events(trace_json_of(make_record(spans=SPANS)), "X")]
    assert names.index(f"{TRACK} 3: committed") < names.index("planning")


def test_trace_imbalance_counter_omits_unknown_values(
    make_record: MakeRecord,
) -> None:
    levels = (ImbalanceSample(0, START + 1.0, 0.25), ImbalanceSample(0, START + 2.0, math.nan))
    trace = trace_json_of(make_record(spans=SPANS, levels=levels))
    assert faults(trace) == []
    (counter,) = events(trace, "C")
    assert counter["args"] == {"max/mean - 1": 0.25}


def test_trace_of_run_without_spans_is_empty(make_record: MakeRecord) -> None:
    trace = trace_json_of(make_record())
    assert trace["traceEvents"] == []
    assert faults(trace) == []


def copy_round(rank: int, begin: float, **details: int) -> RecordedSpan:
    return RecordedSpan(rank, str(Track.COPY), "round", START + begin, START + begin + 0.1, details)


def arrows(trace: Any) -> list[tuple[str, int, int]]:
    """Name, the rank where it begins, the rank where it ends."""
    ends: dict[int, dict[str, Any]] = {}
    for event in events(trace, "s") + events(trace, "f"):
        ends.setdefault(event["id"], {})[event["ph"]] = event
    return [(both["s"]["name"], both["s"]["pid"], both["f"]["pid"]) for both in ends.values()]


def test_trace_has_arrow_from_sender_to_receiver_of_each_round() -> None:
    spans = (
        copy_round(0, 0.0, to=1, sent=2),
        copy_round(1, 0.05, **{"from": 0, "received": 2}, to=2, sent=1),
        copy_round(2, 0.05, **{"from": 1, "received": 1}),
        copy_round(0, 1.0, to=1, sent=1),
        copy_round(1, 1.0, **{"from": 0, "received": 1}),
    )
    trace = json.loads(trace_of(spans, ()))
    assert faults(trace) == []
    assert sorted(arrows(trace)) == [("weights", 0, 1), ("weights", 0, 1), ("weights", 1, 2)]


def test_trace_counts_peers_of_a_stage_within_it() -> None:
    spans = (copy_round(2, 0.0, to=1), copy_round(3, 0.0, **{"from": 0}))
    assert arrows(json.loads(trace_of(spans, (), group=2))) == [("weights", 2, 3)]
    assert arrows(json.loads(trace_of(spans, ()))) == []


def test_trace_has_no_arrow_where_rounds_were_dropped() -> None:
    spans = (copy_round(0, 0.0, to=1), copy_round(0, 1.0, to=1), copy_round(1, 1.0, **{"from": 0}))
    assert arrows(json.loads(trace_of(spans, ()))) == []


def test_trace_has_arrow_from_vote_to_boundary_that_commits() -> None:
    def vote(step: int, verdict: str) -> RecordedSpan:
        begin, end = START + step - 0.5, START + step - 0.25
        return RecordedSpan(
            1, str(Track.VOTE), "vote", begin, end, {"step": step, "verdict": verdict}
        )

    spans = (
        vote(3, "Pending()"),
        vote(4, "Commit(chunks=2)"),
        *(
            RecordedSpan(1, str(Track.BOUNDARY), "boundary", START + step, START + step + 0.1,
                         {"step": step})
            for step in (3, 4, 5)
        ),
    )  # fmt: skip
    trace = json.loads(trace_of(spans, ()))
    assert faults(trace) == []
    assert arrows(trace) == [("commit", 1, 1)]
    (end,) = events(trace, "f")
    (boundary,) = [
        e for e in events(trace, "X") if e["args"].get("step") == 4 and e["tid"] == end["tid"]
    ]
    assert boundary["ts"] <= end["ts"] <= boundary["ts"] + boundary["dur"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.data())
def test_trace_of_arbitrary_spans_is_valid(make_record: MakeRecord, data: st.DataObject) -> None:
    spans = []
    for rank in range(2):
        for track in data.draw(st.sets(st.sampled_from(list(Track)))):
            at = START
            for gap, length in data.draw(st.lists(st.tuples(*[st.floats(0, 5)] * 2), max_size=5)):
                begin = at + gap
                at = begin + length
                spans.append(RecordedSpan(rank, str(track), "x", begin, at))
    assert faults(trace_json_of(make_record(spans=tuple(spans)))) == []


def test_trace_of_spans_without_run_record() -> None:
    trace = json.loads(
        trace_of(SPANS, (ImbalanceSample(0, START + 1.0, 0.25),), {"model": "target"})
    )
    assert faults(trace) == []
    assert {event["pid"] for event in events(trace, "X")} == {0, 1}
    assert [event["args"] for event in events(trace, "C")] == [{"max/mean - 1": 0.25}]
    assert trace["otherData"]["model"] == "target"
