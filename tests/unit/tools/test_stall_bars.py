"""The bars that `benchmarks/engine_stall.py` judges, and what its kept results say of them."""

import json
import sys
from importlib import import_module
from typing import Any

from helpers.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"


def engine_stall() -> Any:
    """Imports `benchmarks/engine_stall.py`; the folder of benchmarks is no package."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return import_module("engine_stall")
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_stall_bar_is_twenty_times_less_than_stop_the_world() -> None:
    bars = {"p99": [1.0], "stall": [19.9], "gain": [0.9]}
    assert engine_stall().missed(bars) == ["stall"]
    assert engine_stall().missed({**bars, "stall": [20.0]}) == []


def test_kept_stall_results_are_judged_by_these_bars() -> None:
    report = json.loads((BENCHMARKS / "results" / "engine_stall.json").read_text("utf-8"))
    for point in report["tables"]["points"]:
        missed_bars = engine_stall().missed(point)
        assert point["met"] == (f"**no**: {', '.join(missed_bars)}" if missed_bars else "yes"), (
            point["point"]
        )
