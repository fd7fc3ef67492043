"""The figures of a simulation as plain values."""

import platform
from dataclasses import asdict
from enum import Enum
from math import isfinite
from typing import Any

import numpy as np

from equipoise import __version__
from equipoise.balancer.requests.policy_comparison import Interval, Result
from equipoise.balancer.requests.simulation_run import Figures
from equipoise.report.simulation.columns import judge
from equipoise.report.simulation.result import QUANTILES, Seen, Simulated, Subject, Sweep


def to_json(found: Simulated) -> dict[str, Any]:
    """Everything but the pictures; null where there is no such figure."""
    return {
        "equipoise": __version__,
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "subject": _subject(found.subject),
        "seeds": list(found.seeds),
        "reference": found.reference.contender.label,
        "policies": {
            result.contender.label: _policy(result, found.reference)
            | _seen(found.seen.get(result.contender.label))
            for result in found.results
        },
        "best": {
            judged.column.figure: {"policy": judged.best, "not_told_apart": list(judged.alike)}
            for judged in judge(found.results)
        },
        "sweep": None if found.sweep is None else _sweep(found.sweep),
    }


def plain(value: Any) -> Any:
    """As JSON has it: enums by value, paths by name, no NaN."""
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _subject(subject: Subject) -> dict[str, Any]:
    return dict(plain(asdict(subject)))


def _policy(result: Result, reference: Result) -> dict[str, Any]:
    names = Figures.names()
    beside = {name: _interval(result.beside(reference, name)) for name in names}
    return {
        "settings": plain(asdict(result.contender.policy)),
        "figures": {n: [plain(getattr(run, n)) for run in result.figures] for n in names},
        "intervals": {name: _interval(result.interval(name)) for name in names},
        "beside_reference": None if result is reference else beside,
    }


def _seen(seen: Seen | None) -> dict[str, Any]:
    if seen is None:
        return {"balance": None, "wait_by_size": None}
    return {
        "balance": {"quantiles": plain(QUANTILES.tolist()), "values": plain(seen.balance.tolist())},
        "wait_by_size": {
            "prompt_tokens": plain(seen.sizes.tolist()),
            "seconds": plain(seen.waits.tolist()),
        },
    }


def _sweep(sweep: Sweep) -> dict[str, Any]:
    return {
        "over": sweep.over,
        "points": [
            {
                "value": point.value,
                "policies": {r.contender.label: _intervals(r) for r in point.results},
            }
            for point in sweep.points
        ],
    }


def _intervals(result: Result) -> dict[str, Any]:
    return {name: _interval(result.interval(name)) for name in Figures.names()}


def _interval(value: Interval) -> dict[str, Any]:
    return {"mean": plain(value.mean), "half": plain(value.half)}
