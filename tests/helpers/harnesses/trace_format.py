"""The rules of Chrome's "Trace Event Format" for the events that are written, as a check.

Source: the document of that name by the authors of the viewer: the JSON object form, complete (X),
counter (C), metadata (M) and flow (s, f) events.
"""

import math
from collections import defaultdict
from typing import Any

METADATA = {
    "process_name": {"name": str},
    "thread_name": {"name": str},
    "process_sort_index": {"sort_index": int},
    "thread_sort_index": {"sort_index": int},
}
SLACK = 1e-3
"""Microseconds by which sums of rounded numbers may be off."""


def faults(trace: Any) -> list[str]:
    """What a viewer would reject, or show wrongly; in words."""
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        return ["no traceEvents"]
    messages = [f"{event}: {fault}" for event in events for fault in _faults_of(event)]
    if trace.get("displayTimeUnit") not in ("ms", "ns"):
        messages.append("displayTimeUnit is ms or ns")
    return [*messages, *_crossing(events), *_unnamed(events), *_loose(events)]


def _faults_of(event: dict[str, Any]) -> list[str]:
    has_name = isinstance(event.get("name"), str) and event["name"] != ""
    messages = [] if has_name else ["no name"]
    messages += [] if isinstance(event.get("pid"), int) else ["no process"]
    rule = RULES.get(str(event.get("ph")))
    return messages + (rule(event) if rule else [f"unknown phase {event.get('ph')}"])


def _complete(event: dict[str, Any]) -> list[str]:
    thread = [] if isinstance(event.get("tid"), int) else ["no thread"]
    return _time(event, "ts") + _time(event, "dur") + thread


def _counter(event: dict[str, Any]) -> list[str]:
    values = event.get("args", {}).values()
    numbers = bool(values) and all(isinstance(value, int | float) for value in values)
    return _time(event, "ts") + ([] if numbers else ["a counter counts numbers"])


def _metadata(event: dict[str, Any]) -> list[str]:
    expected = METADATA.get(event["name"], {})
    kinds = {key: type(value) for key, value in event.get("args", {}).items()}
    return [] if kinds == expected else [f"arguments {kinds}, wanted {expected}"]


def _time(event: dict[str, Any], key: str) -> list[str]:
    value = event.get(key)
    good = isinstance(value, int | float) and math.isfinite(value) and value >= 0
    return [] if good else [f"{key} is {value}"]


def _crossing(events: list[dict[str, Any]]) -> list[str]:
    """Complete events of one thread lie beside each other or within each other."""
    threads = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            threads[event["pid"], event["tid"]].append(event)
    messages = []
    for mine in threads.values():
        open_until: list[float] = []
        for event in sorted(mine, key=lambda event: (event["ts"], -event["dur"])):
            while open_until and open_until[-1] <= event["ts"] + SLACK:
                open_until.pop()
            if open_until and event["ts"] + event["dur"] > open_until[-1] + SLACK:
                messages.append(f"{event} crosses the one before it")
            open_until.append(event["ts"] + event["dur"])
    return messages


def _unnamed(events: list[dict[str, Any]]) -> list[str]:
    named = {(e["pid"], e["tid"]) for e in events if e.get("name") == "thread_name"}
    used = {(e["pid"], e["tid"]) for e in events if e.get("ph") == "X"}
    return [f"thread {thread} has no name" for thread in sorted(used - named)]


def _flow(event: dict[str, Any]) -> list[str]:
    known = isinstance(event.get("id"), int) and isinstance(event.get("tid"), int)
    binds = event["ph"] == "s" or event.get("bp") == "e"
    return (
        _time(event, "ts")
        + ([] if known else ["no id or thread"])
        + ([] if binds else ["ends at the next span"])
    )


def _loose(events: list[dict[str, Any]]) -> list[str]:
    """A flow has one begin and one later end, both within a span of their thread."""
    spans = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    flows: dict[int, dict[str, float]] = defaultdict(dict)
    messages = []
    for event in events:
        if event.get("ph") in ("s", "f"):
            flows[event["id"]][event["ph"]] = event["ts"]
            around = spans[event["pid"], event["tid"]]
            if not any(begin <= event["ts"] <= end for begin, end in around):
                messages.append(f"{event} lies in no span")
    return messages + [
        f"flow {name} has {ends}"
        for name, ends in flows.items()
        if set(ends) != {"s", "f"} or ends["s"] > ends["f"]
    ]


RULES = {"s": _flow, "f": _flow, "X": _complete, "C": _counter, "M": _metadata}
"""By kind of event."""
