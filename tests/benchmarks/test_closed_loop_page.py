"""The page of the closed loop says what was run, and what was run closes the loop."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return runpy.run_path(str(BENCHMARKS / f"{name}.py"))


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return module("closed_loop_page", monkeypatch)


def test_the_page_is_what_the_results_say(page: dict[str, Any]) -> None:
    assert page["PAGE"].read_text() == page["page"]()


def test_a_loop_that_has_not_been_run_is_owed(
    page: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(page["page"].__globals__, "RESULTS", tmp_path)
    assert "OWED" in page["page"]()


@pytest.mark.parametrize("kind", ["python", "chinese", "tables"])
def test_the_two_days_share_no_text_and_leave_none_out(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from equipoise.demo.traffic import shipped_phase

    half = module("closed_loop", monkeypatch)["half"]
    text = shipped_phase(kind).text
    first, second = half(text, 0), half(text, 1)
    assert first + second == text
    assert abs(len(first) - len(second)) <= 8
    first.decode()
    second.decode()
