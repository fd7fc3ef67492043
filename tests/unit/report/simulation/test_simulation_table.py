"""The table of `equipoise simulate`."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from equipoise.balancer.requests.policy_comparison import PolicyResult
from equipoise.report.simulation.columns import COLUMNS, REPORT_ONLY, best_of_columns
from equipoise.report.simulation.result import SimulationResult, Sweep, SweepPoint
from equipoise.report.simulation.table import BEST_MARK, WIDTH, fill_columns, render
from equipoise.report.terminal import ColourMode

MakeResult = Callable[..., PolicyResult]


def test_simulation_table_fits_width_with_every_column_once(
    simulation_result: SimulationResult,
) -> None:
    text = render(simulation_result, ColourMode.PLAIN)
    assert max(map(len, text.splitlines())) <= WIDTH
    heads = [line for line in text.splitlines() if re.match(r"^ {8}", line)]
    words = re.split(r" {2,}", "  ".join(heads).strip())
    for column in COLUMNS:
        hidden = column.figure in REPORT_ONLY or column.figure == "failed"
        assert words.count(column.head) == (0 if hidden else 1), column.head


def test_simulation_table_marks_only_best_of_column(simulation_result: SimulationResult) -> None:
    best = {one.column.figure: one.best for one in best_of_columns(simulation_result.results)}
    for column in fill_columns(simulation_result, best_of_columns(simulation_result.results)):
        marked_labels = [
            label
            for label, text in zip(simulation_result.labels, column.texts, strict=True)
            if text.endswith(BEST_MARK)
        ]
        expected = best.get(column.column.figure)
        assert marked_labels == ([] if expected is None else [expected])


def test_simulation_table_colours_change_no_text(simulation_result: SimulationResult) -> None:
    coloured_text = render(simulation_result, ColourMode.COLOUR)
    assert "\033[1;32m" in coloured_text
    assert re.sub(r"\033\[[0-9;]*m", "", coloured_text) == render(
        simulation_result, ColourMode.PLAIN
    )


def test_simulation_table_describes_subject_and_signs(simulation_result: SimulationResult) -> None:
    text = render(simulation_result, ColourMode.PLAIN)
    for words in (
        "sharegpt: 80 requests on 3 workers of 4 slots; 3 policies, 2 seeds",
        "each seed draws requests of its own",
        "saturated: as soon as one request is served, another comes",
        "50% of it fixed",
        "no request failed",
        "\u00b1 half of the 95 % confidence interval over 2 seeds (Student's t)",
    ):
        assert words in text


def test_simulation_table_shows_failed_column_on_failures(
    simulate_small: Callable[..., SimulationResult],
) -> None:
    text = render(simulate_small(kv_tokens=300), ColourMode.PLAIN)
    assert "no request failed" not in text
    assert re.search(r"\bfailed\b", text)


def test_simulation_table_strips_escape_codes(simulation_result: SimulationResult) -> None:
    hostile = replace(simulation_result.subject, workload="\x1b[2J", notes=("\x1b]0;",))
    text = render(replace(simulation_result, subject=hostile), ColourMode.PLAIN)
    assert "\x1b" not in text


@pytest.mark.parametrize("over", ["load", "workers"])
def test_simulation_table_sweep_has_block_per_figure(
    simulation_result: SimulationResult, over: str
) -> None:
    points = (SweepPoint(1, simulation_result.results), SweepPoint(2, simulation_result.results))
    text = render(replace(simulation_result, sweep=Sweep(over, points)), ColourMode.PLAIN)
    assert text.count(f", by {over}") == 3
    [row] = [line for line in text.split("idle, %, by")[1].splitlines() if line.startswith("fit")][
        :1
    ]
    assert len(row.split()) == 3
    assert row.split()[1] == row.split()[2]


def test_simulation_table_shows_dashes_for_missing_figures(
    simulation_result: SimulationResult, make_result: MakeResult
) -> None:
    nothing = make_result("none", "idle", (float("nan"), float("nan")))
    text = render(
        replace(simulation_result, results=(*simulation_result.results, nothing)), ColourMode.PLAIN
    )
    [row] = [line for line in text.splitlines() if line.startswith("none")][:1]
    assert " -" in row
