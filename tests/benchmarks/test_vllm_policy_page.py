"""What the page says of placement in vLLM is what the figures say, met or not."""

import json
import runpy
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
Figures = dict[str, Any]
Text = Callable[[Figures], list[str]]


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> Text:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    found: Text = runpy.run_path(str(BENCHMARKS / "vllm_policy_page.py"))["text"]
    return found


@pytest.fixture
def figures() -> Figures:
    saved = BENCHMARKS / "results" / "vllm-policy.json"
    found: Figures = deepcopy(json.loads(saved.read_text())["figures"])
    return found


def row(lines: list[str], what: str) -> list[str]:
    """The cells of the only line of the table of bars that begins so."""
    found = [line for line in lines if line.startswith(f"| {what} |")]
    assert len(found) == 1
    return [cell.strip() for cell in found[0].strip("|").split("|")]


def level(value: float) -> dict[str, float]:
    return {"median": value, "lowest": value, "highest": value}


@pytest.mark.parametrize(
    ("what", "rival", "figure", "bad"),
    [
        ("slots that stock moves, steady", "stock", "moved", 0.4),
        ("slots that (a) moves, steady", "(a) policy", "moved", 0.051),
        (
            "balancedness of (a)'s next window over stock's, steady",
            "(a) policy",
            "of_stock",
            0.98,
        ),
        ("slots that (b) moves, steady", "(b) engine", "moved", 0.011),
    ],
)
def test_a_bar_that_the_worst_rebalance_misses_shows_as_missed(
    text: Text, figures: Figures, what: str, rival: str, figure: str, bad: float
) -> None:
    assert row(text(figures), what)[3] == "yes"
    found = figures["traffic"][0]["rivals"][rival][figure]
    found["lowest" if bad in (0.4, 0.98) else "highest"] = bad
    assert row(text(figures), what)[3] == "**no**"
    assert f"{bad:.2%}" in row(text(figures), what)[2]


@pytest.mark.parametrize(("ratio", "said"), [(20.0, "yes"), (19.9, "**no**")])
def test_the_commit_is_judged_by_the_worst_round(
    text: Text, figures: Figures, ratio: float, said: str
) -> None:
    figures["commit"]["ratio"] = level(ratio)
    assert row(text(figures), "host time of a layer's commit, stock over (b)")[3] == said


def test_every_traffic_and_every_rival_has_its_line(text: Text, figures: Figures) -> None:
    lines = text(figures)
    for traffic in figures["traffic"]:
        head = next(
            i for i, line in enumerate(lines) if f"**{traffic['name'].capitalize()}**" in line
        )
        for rival in traffic["rivals"]:
            assert any(line.startswith(f"| {rival} |") for line in lines[head : head + 9])
