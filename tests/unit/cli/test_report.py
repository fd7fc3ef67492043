"""`equipoise report`: the table, the figures, the page, and what it refuses."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.balancer import formats
from equipoise.balancer.experts import plan
from equipoise.cli.report import COMMAND, ReportRequest
from equipoise.report import svg

RANKS, EXPERTS = 4, 8


@pytest.fixture(autouse=True)
def recorded_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray[Any, Any]:
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(7)
    by_rank = draw.integers(0, 50, (RANKS, 3, 2, EXPERTS)) * np.arange(EXPERTS)
    counts = by_rank.sum(axis=0)
    statistics = formats.ExpertStatistics(counts, (3, 5), by_rank, 100, 2)
    formats.write_statistics("recorded", statistics)
    formats.write_statistics("summed", formats.ExpertStatistics(counts, (3, 5)))
    Path("empty").mkdir()
    formats.write_statistics("counts.npz", formats.ExpertStatistics(counts, (3, 5)))
    np.save("zero.npy", np.zeros((2, EXPERTS), dtype=np.int64))
    placement_plan = plan(counts, slots=12, ranks=RANKS)
    layout = formats.ExpertPlacement(placement_plan.placement, placement_plan.shares, RANKS, (3, 5))
    formats.write_placement("placement.json", layout)
    formats.write_placement("placement.yaml", layout)
    formats.write_placement(
        "others.json",
        formats.ExpertPlacement(placement_plan.placement, placement_plan.shares, RANKS),
    )
    found_counts: np.ndarray[Any, Any] = counts
    return found_counts


BAD = {
    "no statistics": ((), "STATS is missing: see equipoise"),
    "a missing folder": (("none",), "none: "),
    "ranks that nobody says": (("counts.npz",), "--ranks is needed: counts.npz does not say"),
    "ranks that were summed": (("summed",), "--ranks is needed: summed has one rank's counts, or"),
    "iterations that were not recorded": (
        ("recorded", "--range", "101-104"),
        "--range: recorded: has iterations 100-103, and 101-104 is not within them",
    ),
    "no iteration": (("recorded", "--range", "101-101"), "expected START-STOP"),
    "no rank": (("recorded", "--ranks", "0"), "--ranks must be 1 to 4096, got 0"),
    "more ranks than may be": (
        ("recorded", "--ranks", "5000"),
        "--ranks must be 1 to 4096, got 5000",
    ),
    "nothing counted": (("zero.npy", "--ranks", "2"), "all counts are 0"),
    "a placement as statistics": (("placement.json",), "is a placement (format equip"),
    "statistics as a placement": (
        ("recorded", "--placement", "counts.npz"),
        "--placement: counts.npz: is statistics (format npz), not a placement",
    ),
    "a placement that is missing": (("recorded", "--placement", "no.json"), "no.json: cannot be r"),
    "a placement of unknown ranks": (("recorded", "--placement", "placement.yaml"), "by --ranks"),
    "a placement of other ranks": (
        ("recorded", "--placement", "placement.json", "--ranks", "2"),
        "is for 4 ranks, not 2",
    ),
    "a placement of other layers": (
        ("recorded", "--placement", "others.json"),
        "--placement: others.json: has no layer 3, which the statistics have",
    ),
    "figures over the placement": (
        ("recorded", "--placement", "placement.json", "--json", "placement.json"),
        "--json: placement.json is the file that --placement is read from",
    ),
    "one file for two": (("recorded", "--json", "f", "--html", "./f"), "--json is written to"),
    "a folder as page": (("recorded", "--html", "."), "is a folder, not a file"),
    "a range that begins below 0": (
        ("recorded", "--range", "-5-10"),
        "expected START-STOP, whole numbers with START below STOP, got '-5-10'",
    ),
    "an empty folder": (("empty",), "empty: is a folder without meta_info.json"),
    "an unknown option": (
        ("recorded", "--rank", "2"),
        "unknown option --rank; did you mean --ranks?",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_report_rejects_bad_input_and_writes_nothing(
    equipoise: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    before = sorted(os.listdir(tmp_path))
    answer = equipoise("report", *arguments)
    assert (answer.code, answer.out) == (2, "")
    [line] = answer.err.splitlines()
    assert line.startswith("equipoise: error: ")
    assert message in line
    assert sorted(os.listdir(tmp_path)) == before


def test_report_table_follows_definitions(
    equipoise: Callable[..., Any], recorded_counts: np.ndarray[Any, Any]
) -> None:
    answer = equipoise("report", "recorded")
    rows = recorded_counts.reshape(3, 2, RANKS, -1).sum(axis=3)
    imbalance = (rows.max(axis=2) / rows.mean(axis=2) - 1).mean()
    std = rows.std(axis=2, ddof=1).mean()
    [line] = [line for line in answer.out.splitlines() if line.startswith("linear, by rank")]
    assert (answer.code, answer.err) == (0, "")
    assert line.split()[3:7] == ["8", f"{rows.mean():,.1f}", f"{std:,.1f}", f"{imbalance:.4f}"]
    assert "2 layers of 8 experts on 4 ranks" in answer.out
    assert "iterations 100 to 102" in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80


def test_report_compares_placement_with_linear(equipoise: Callable[..., Any]) -> None:
    answer = equipoise(
        "report",
        "recorded",
        "--placement",
        "placement.json",
        "--json",
        "f.json",
        "--html",
        "h/r.html",
    )
    assert answer.code == 0
    assert answer.err.splitlines() == ["figures: f.json", "page: h/r.html, in a new folder"]
    served = json.loads(Path("f.json").read_text())["served"]
    before, after = (served[name]["by_rank"]["average"] for name in ("linear", "placement"))
    assert after["imbalance"] < before["imbalance"]
    assert after["mean"] == pytest.approx(before["mean"])
    assert len(served["placement"]["by_slot"]["layers"]["std"]) == 2
    page = Path("h/r.html").read_text()
    assert page.count("<svg") == 3
    assert "destination rank" in page


def test_report_layer_without_rows_is_null(equipoise: Callable[..., Any]) -> None:
    counts = np.zeros((1, 2, EXPERTS), dtype=np.int64)
    counts[0, 1, 2] = 9
    np.save("half.npy", counts)
    answer = equipoise("report", "half.npy", "--ranks", "2", "--json", "f.json", "--html", "h.html",
                       "--quiet")  # fmt: skip
    assert (answer.code, answer.err) == (0, "")
    layers = json.loads(Path("f.json").read_text())["served"]["linear"]["by_rank"]["layers"]
    assert layers["imbalance"] == [None, 1.0]


def test_report_without_matplotlib_prints_table_and_warns(
    equipoise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> str:
        raise svg.PlotsMissing("matplotlib is missing")

    monkeypatch.setattr("equipoise.report.placement.heat_maps.draw", missing)
    answer = equipoise("report", "recorded", "--html", "r.html")
    assert answer.code == 0
    assert answer.err == "equipoise: warning: no page: matplotlib is missing\n"
    assert "linear, by rank" in answer.out
    assert not Path("r.html").exists()


def test_report_page_escapes_names(equipoise: Callable[..., Any]) -> None:
    os.rename("recorded", "<b>&")
    assert equipoise("report", "<b>&", "--html", "r.html").code == 0
    page = Path("r.html").read_text()
    assert "<b>&" not in page
    assert "&lt;b&gt;&amp;" in page


def test_report_options_come_from_config_file(equipoise: Callable[..., Any]) -> None:
    Path("report.yaml").write_text("ranks: 2\nquiet: true\njson: f.json\n")
    assert equipoise("report", "recorded", "--config", "report.yaml").err == ""
    assert json.loads(Path("f.json").read_text())["ranks"] == 2
    fields = set(ReportRequest.__dataclass_fields__)
    assert set(COMMAND.options) == fields - {"statistics"}


def test_report_range_ignores_other_iterations(
    equipoise: Callable[..., Any], recorded_counts: np.ndarray[Any, Any]
) -> None:
    part = formats.read_statistics("recorded").select_iterations(formats.IterationRange(101, 103))
    formats.write_statistics("part", part)
    answer = equipoise("report", "recorded", "--range", "101-103", "--json", "some.json", "--quiet")
    assert answer.code == 0
    assert answer.out == equipoise("report", "part").out
    assert "iterations 101 to 102" in answer.out
    assert json.loads(Path("some.json").read_text())["range"] == "101-103"


@pytest.mark.parametrize("given", ["a-run", "a-run/record.npz"])
@pytest.mark.parametrize("command", ["report", "plan", "advise", "replay"])
def test_folder_of_a_run_is_refused_with_the_command_that_writes_its_counts(
    equipoise: Callable[..., Any], command: str, given: str
) -> None:
    Path("a-run").mkdir()
    np.savez("a-run/record.npz", record=np.array("not counts"))
    shape = ("--slots", "12", "-o", "new.json") if command == "plan" else ()
    answer = equipoise(command, given, "--ranks", "4", *shape)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == (
        f"equipoise: error: {given}: is of a run: `equipoise record --run a-run -o counts.npz` "
        "writes its counts\n"
    )
