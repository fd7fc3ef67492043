"""`equipoise run` in stages: the outputs of one process, whatever the shape, balancing on."""

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import settings

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
TEXT = str(files("equipoise.demo").joinpath("text", "python.txt"))
BARE = ("--text", TEXT, "--steps", "18", "--quiet")
SHORT = (*BARE, "--window-size", "2", "--step-interval", "2")
"""One phase; two epochs fit in wherever the tests run."""
SHAPES = {
    "2 x 2": ("--pipeline-ranks", "2"),
    "4 x 1": ("--pipeline-ranks", "4"),
    "2 x 2, rows kept at home, exchange of fixed capacity": (
        *("--pipeline-ranks", "2", "--exchange", "fixed", "--locality", "prefer"),
    ),
    "2 x 2, handed over in slices": ("--pipeline-ranks", "2", "--tensor-ranks", "2"),
}
MORE = {
    "1 x 4, rows kept at home, exchange of fixed capacity": (
        *("--exchange", "fixed", "--locality", "prefer"),
    ),
    "1 x 4, in slices of two": ("--tensor-ranks", "2"),
    "2 x 2, three micro-batches, locked": (
        *("--pipeline-ranks", "2", "--micro-batches", "3", "--commit", "locked"),
    ),
}
"""In the deep profile."""
if settings.get_current_profile_name() == "deep":
    SHAPES |= MORE


def equipoise(*arguments: str) -> None:
    ended = command(*arguments)
    assert ended.returncode == 0, ended.stderr


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return command("run", *arguments, "--out", str(folder))


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "equipoise", *arguments],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_shape_has_the_outputs_of_one_process(tmp_path: Path, shape: tuple[str, ...]) -> None:
    ended = run(tmp_path, *SHORT, *shape)
    figures = json.loads((tmp_path / "summary.json").read_text())
    assert figures["outputs_identical"], ended.stdout + ended.stderr
    assert {v["outputs"] for v in figures["variants"].values()} == {figures["reference_outputs"]}
    assert set(figures["variants"]) == {"unbalanced", "static", "lagged", "exact"}
    assert figures["ranks"] * figures["stages"] == 4
    assert figures["epochs"] > 0
    assert figures["aborts"] == {}
    assert "4 ranks" in ended.stdout


def test_a_given_placement_is_served_in_stages_and_reported(tmp_path: Path) -> None:
    first, load, plan = tmp_path / "first", tmp_path / "load.csv", tmp_path / "placement.json"
    equipoise("run", *BARE, "--pipeline-ranks", "2", "--no-balance", "--out", str(first))
    equipoise("record", "--run", str(first), "-o", str(load))
    equipoise("plan", str(load), "--ranks", "2", "--slots", "40", "-o", str(plan))
    given = [*BARE, "--pipeline-ranks", "2", "--placement", str(plan)]
    ended = run(tmp_path / "second", *given)
    figures = json.loads((tmp_path / "second" / "summary.json").read_text())
    assert ended.returncode == 0, ended.stderr
    assert figures["outputs_identical"]
    assert figures["imbalance_placement"] < figures["imbalance_unbalanced"]
    report = (tmp_path / "second" / "report.html").read_text()
    assert "4 ranks in 2 stages" in report
