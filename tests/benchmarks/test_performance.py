import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def test_the_performance_page_is_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    module = runpy.run_path(str(BENCHMARKS / "performance.py"))
    assert module["PAGE"].read_text() == module["page"]()
    assert module["README"].read_text() == module["readme"]()


def test_a_figure_without_results_is_owed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    module = runpy.run_path(str(BENCHMARKS / "performance.py"))
    monkeypatch.setitem(module["_load"].__globals__, "RESULTS", tmp_path)
    assert "OWED" in module["page"]()
