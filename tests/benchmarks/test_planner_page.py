"""What the pages say of placement is what the results say, met or not."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
Figures = dict[str, Any]
Module = dict[str, Any]


@pytest.fixture
def performance(monkeypatch: pytest.MonkeyPatch) -> Module:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return runpy.run_path(str(BENCHMARKS / "performance.py"))


@pytest.fixture
def page_of(
    performance: Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., str]:
    """The page of performance with other figures in a file of results."""
    load = performance["_load"]

    def page(name: str, change: Callable[[Figures], None]) -> str:
        for source in ("planner", "even_split"):
            found = load(source)
            if source == name:
                change(found["figures"])
            (tmp_path / f"{source}.json").write_text(json.dumps(found))
        monkeypatch.setitem(load.__globals__, "RESULTS", tmp_path)
        return str(performance["page"]())

    return page


def row(page: str, what: str) -> list[str]:
    """The cells of a line of the table of bars."""
    lines = [line for line in page.splitlines() if line.startswith(f"| {what}")]
    assert len(lines) == 1
    return [cell.strip() for cell in lines[0].strip("|").split("|")]


def test_the_page_of_drop_ins_is_what_the_results_say(performance: Module) -> None:
    assert performance["COMPAT"].read_text() == performance["compat"]()


def test_pictures_were_drawn_from_the_results_that_are_shown(performance: Module) -> None:
    pictures = performance["pictures"]
    for file, (source, _, part) in pictures.PICTURES.items():
        figures = part(performance["_load"](source)["figures"])
        assert (
            f"<desc>figures {pictures.mark(figures)}</desc>" in (pictures.IMAGES / file).read_text()
        )
        assert f"images/{file}" in performance["page"]()


def test_every_bar_says_whether_it_is_met(performance: Module) -> None:
    page = performance["page"]()
    for bar in performance["planner_page"].bars.PLANNER:
        assert row(page, bar.what)[-1] in ("yes", "yes, both", "yes; not the second", "**no**")


def test_a_bar_that_is_missed_shows_as_missed(page_of: Callable[..., str]) -> None:
    def worse(figures: Figures) -> None:
        figures["a"]["algorithms"]["connected"]["plan"] = 0.0011

    found = row(page_of("planner", worse), "imbalance that `connected` plans")
    assert found[1] == "at most 0.0010"
    assert found[2].startswith("0.0011")
    assert found[3] == "**no**"


def test_a_figure_that_is_no_number_meets_no_bar(page_of: Callable[..., str]) -> None:
    def none(figures: Figures) -> None:
        figures["a"]["times"]["steady"]["ratio"] = float("nan")

    assert row(page_of("planner", none), "time of `incremental` over greedy's, steady")[3] == (
        "**no**"
    )


@pytest.mark.parametrize(
    ("moved", "said"), [(0.004, "yes, both"), (0.0041, "yes; not the second"), (0.011, "**no**")]
)
def test_a_stretch_is_told_from_the_bar(
    page_of: Callable[..., str], moved: float, said: str
) -> None:
    def to(figures: Figures) -> None:
        figures["a"]["algorithms"]["incremental"]["moved_steady"] = moved

    assert row(page_of("planner", to), "slots that `incremental` moves, steady")[3] == said


def test_the_worst_seed_decides_for_drop_ins(page_of: Callable[..., str]) -> None:
    def worse(figures: Figures) -> None:
        figures["starts"]["first layout, log-normal 0.02"]["drop-in"][3]["moves"] = 3701

    page = page_of("even_split", worse)
    assert row(page, "moves for that")[2:] == ["3,701", "**no**"]
    assert row(page, "max/mean afterwards")[3] == "yes"


def test_a_shape_that_was_not_measured_is_owed(page_of: Callable[..., str]) -> None:
    page = page_of("planner", lambda figures: figures.pop("d"))
    assert row(page, "the same, 128 ranks")[2:] == ["OWED", "OWED"]
