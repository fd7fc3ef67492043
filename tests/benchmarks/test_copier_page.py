"""What the page says of the host copier is what the results say, faster or not."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
Figures = dict[str, Any]


@pytest.fixture
def performance(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return runpy.run_path(str(BENCHMARKS / "performance.py"))


@pytest.fixture
def page_of(
    performance: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[Figures | None], str]:
    """The page with these figures of the copier, and none of anything else."""
    load = performance["_load"]
    real = load("copier")

    def page(figures: Figures | None) -> str:
        if figures is not None:
            (tmp_path / "copier.json").write_text(json.dumps({**real, "figures": figures}))
        monkeypatch.setitem(load.__globals__, "RESULTS", tmp_path)
        whole = str(performance["page"]())
        return whole.split("## The host copier")[1].split("\n## ")[0]

    return page


def way(times: float) -> Figures:
    return {
        "gigabytes_per_second": 10 * times,
        "times_memcpy": times,
        "lowest": times / 2,
        "highest": times * 2,
    }


def test_without_results_it_is_owed(page_of: Callable[[Figures | None], str]) -> None:
    assert page_of(None).split() == ["OWED"]


def test_every_load_and_way_has_its_row(page_of: Callable[[Figures | None], str]) -> None:
    figures = {
        "one": {"memcpy": way(1.0), "plain, 1 threads": way(0.5), "plain, 2 threads": way(1.25)},
        "many": {"memcpy": way(1.0), "plain, 2 threads": way(0.75)},
    }
    page = page_of(figures)
    assert "| one | memcpy | 10.00 | 1 |" in page
    assert "| one | plain, 2 threads | 12.50 | 1.25 (0.62 to 2.50) |" in page
    assert page.count("\n| ") == 1 + 5
    assert "one, no slower (1.25); many, slower (0.75)." in page
    assert "`python benchmarks/copier.py` at commit " in page


def test_the_file_of_results_has_what_the_page_asks_for(performance: dict[str, Any]) -> None:
    found = performance["_load"]("copier")
    assert found is not None
    for ways in found["figures"].values():
        assert ways["memcpy"]["times_memcpy"] == 1.0
        assert any(name.startswith("plain") for name in ways)
