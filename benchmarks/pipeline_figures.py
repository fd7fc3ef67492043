"""From what the stages wrote down to figures; the formulas are in docs/metrics.md."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from handovers import BASELINES, CONTESTANTS
from pipeline_crew import Run, Told
from pipeline_emulation import WARM, in_flight, message_bytes
from pipeline_requests import Floats, Latencies, Serving, latencies
from pipeline_work import Steady, Work

Figures = dict[str, Any]
COLUMNS: dict[str, Callable[[Floats], float]] = {
    "average": lambda found: float(found.mean()),
    "min": lambda found: float(found.min()),
    "max": lambda found: float(found.max()),
    "median": lambda found: float(np.percentile(found, 50)),
    "P75": lambda found: float(np.percentile(found, 75)),
    "P90": lambda found: float(np.percentile(found, 90)),
    "P99": lambda found: float(np.percentile(found, 99)),
}
"""Of a table of latencies."""


@dataclass(frozen=True)
class Record:
    """A run, as its first and its last stage saw it."""

    system: str
    round: int
    stages: Sequence[Figures]

    @property
    def sampled(self) -> list[float]:
        """When the last stage had computed each pass."""
        found: list[float] = self.stages[-1]["ended"]
        return found

    @property
    def start(self) -> float:
        """When the first stage began."""
        found: float = self.stages[0]["began"][0]
        return found

    @property
    def rate(self) -> float:
        """Micro-batches per second, behind those that fill the pipeline."""
        measured = self.sampled[WARM:]
        return (len(measured) - 1) / (measured[-1] - measured[0])

    @property
    def cpu(self) -> float:
        """Processor seconds of a pass, of all stages."""
        spent: float = sum(stage["cpu"] for stage in self.stages)
        return spent / len(self.sampled)


def link_figures(runs: Sequence[Run], told: Told, stages: int) -> Figures:
    """Everything of one link, by what was served.

    Raises:
        RuntimeError: a stage was given something other than what the one before had sent.
    """
    works = {run.work.name: run.work for run in runs}
    points, scenarios = [], []
    for name, work in works.items():
        found = [
            Record(run.system, run.round, ranks)
            for run, ranks in zip(runs, told.runs, strict=True)
            if run.work.name == name
        ]
        check(found)
        if isinstance(work, Steady):
            points.append(point_figures(work, found, told.link))
        else:
            scenarios.append(serving_figures(work, found, stages))
    return {"points": points, "serving": scenarios}


def check(records: Sequence[Record]) -> None:
    """Every word that was looked at was right, on every stage.

    Raises:
        RuntimeError: one was not.
    """
    for record in records:
        if wrong := sum(stage["wrong"] for stage in record.stages):
            raise RuntimeError(f"{record.system}, round {record.round}: {wrong} wrong words")


def point_figures(work: Steady, records: Sequence[Record], link: Figures) -> Figures:
    """Throughput at one point."""
    compute = records[0].stages[0]["compute"]
    nbytes = message_bytes(work.hidden, work.gauged)
    transfer = dict(link["seconds"])[nbytes]
    return {
        "point": work.fields(),
        "bytes": nbytes,
        "transfer": transfer,
        "compute": compute,
        "bandwidth_bound": nbytes / link["rate"] >= transfer / 2,
        "systems": {
            system: {
                "rate": spread([record.rate for record in found]),
                "of_bound": spread([record.rate * compute for record in found]),
                "cpu": spread([record.cpu for record in found]),
                "messages": found[0].stages[0]["messages"],
            }
            for system, found in _by_system(records).items()
        },
        "over": ratios(records),
    }


def ratios(records: Sequence[Record]) -> Figures:
    """Throughput over that of each baseline, in the same round."""
    rates = {(record.system, record.round): record.rate for record in records}
    systems = _by_system(records)
    return {
        system: {
            base: spread([r.rate / rates[base, r.round] for r in found])
            for base in BASELINES
            if base != system and base in systems
        }
        for system, found in systems.items()
    }


def serving_figures(work: Work, records: Sequence[Record], stages: int) -> Figures:
    """What clients saw, with the requests of all rounds together."""
    assert isinstance(work, Serving)
    _, requests = work.plan(in_flight(stages))
    tokens = sum(request.tokens for request in requests)
    systems = {}
    for system, found in _by_system(records).items():
        seen = [latencies(requests, record.start, record.sampled) for record in found]
        seconds = [record.sampled[-1] - record.start for record in found]
        systems[system] = {
            "latencies": table(seen),
            "duration": spread(seconds),
            "requests_per_second": spread([len(requests) / s for s in seconds]),
            "tokens_per_second": spread([tokens / s for s in seconds]),
        }
    return {"scenario": work.fields(), "name": work.name, "tokens": tokens, "systems": systems}


def table(seen: Sequence[Latencies]) -> Figures:
    """By kind of latency, the columns, in seconds."""
    kinds = ("e2e", "ttft", "tpot", "itl")
    whole = {kind: np.concatenate([getattr(one, kind) for one in seen]) for kind in kinds}
    return {
        kind: {name: column(found) for name, column in COLUMNS.items()}
        for kind, found in whole.items()
    }


def spread(values: Sequence[float]) -> Figures:
    """Of the rounds."""
    return {
        "median": statistics.median(values),
        "lowest": min(values),
        "highest": max(values),
    }


def _by_system(records: Sequence[Record]) -> dict[str, list[Record]]:
    """In the order in which they are named everywhere."""
    found = {system: [r for r in records if r.system == system] for system in CONTESTANTS}
    return {system: of_system for system, of_system in found.items() if of_system}
