"""Figures of a simulation as plain values, for JSON."""

import platform
from dataclasses import asdict
from enum import Enum
from math import isfinite
from typing import Any

import numpy as np

from equipoise import __version__
from equipoise.balancer.requests.policy_comparison import Interval, PolicyResult
from equipoise.balancer.requests.simulation_run import SimulationMetrics
from equipoise.report.simulation.columns import best_of_columns
from equipoise.report.simulation.result import (
    QUANTILES,
    PolicyPlotData,
    SimulationResult,
    SimulationSubject,
    Sweep,
)


def to_json(comparison: SimulationResult) -> dict[str, Any]:
    """Everything but the pictures; null where there is no such figure."""
    return {
        "equipoise": __version__,
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "subject": _subject(comparison.subject),
        "seeds": list(comparison.seeds),
        "reference": comparison.reference.named_policy.label,
        "policies": {
            result.named_policy.label: _policy(result, comparison.reference)
            | _plot_data_json(comparison.plot_data.get(result.named_policy.label))
            for result in comparison.results
        },
        "best": {
            best.column.figure: {
                "policy": best.best,
                "indistinguishable": list(best.indistinguishable),
            }
            for best in best_of_columns(comparison.results)
        },
        "sweep": None if comparison.sweep is None else _sweep(comparison.sweep),
    }


def json_value(value: Any) -> Any:
    """As JSON has it: enums by value, paths by name, no NaN."""
    if isinstance(value, Enum):
        return json_value(value.value)
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _subject(subject: SimulationSubject) -> dict[str, Any]:
    return dict(json_value(asdict(subject)))


def _policy(result: PolicyResult, reference: PolicyResult) -> dict[str, Any]:
    names = SimulationMetrics.names()
    beside = {name: _interval(result.relative_to(reference, name)) for name in names}
    return {
        "settings": json_value(asdict(result.named_policy.policy)),
        "figures": {n: [json_value(getattr(run, n)) for run in result.metrics] for n in names},
        "intervals": {name: _interval(result.interval(name)) for name in names},
        "beside_reference": None if result is reference else beside,
    }


def _plot_data_json(plot_data: PolicyPlotData | None) -> dict[str, Any]:
    if plot_data is None:
        return {"balance": None, "wait_by_size": None}
    return {
        "balance": {
            "quantiles": json_value(QUANTILES.tolist()),
            "values": json_value(plot_data.balance.tolist()),
        },
        "wait_by_size": {
            "prompt_tokens": json_value(plot_data.sizes.tolist()),
            "seconds": json_value(plot_data.waits.tolist()),
        },
    }


def _sweep(sweep: Sweep) -> dict[str, Any]:
    return {
        "over": sweep.over,
        "points": [
            {
                "value": point.value,
                "policies": {r.named_policy.label: _intervals(r) for r in point.results},
            }
            for point in sweep.points
        ],
    }


def _intervals(result: PolicyResult) -> dict[str, Any]:
    return {name: _interval(result.interval(name)) for name in SimulationMetrics.names()}


def _interval(value: Interval) -> dict[str, Any]:
    return {"mean": json_value(value.mean), "half": json_value(value.half)}
