"""`equipoise run` in stages: the outputs of one process, whatever the shape, balancing on."""

import json
from importlib.resources import files
from pathlib import Path

import pytest
from helpers.processes.run_command import call

pytestmark = pytest.mark.timeout(300)
TEXTS = files("equipoise.demo").joinpath("text")
CADENCE = ("--window-size", "2", "--step-interval", "2")
TABLES = ("--text", str(TEXTS.joinpath("tables.txt")))
PYTHON = ("--text", str(TEXTS.joinpath("python.txt")))
SHORT = (*TABLES, "--steps", "12", *CADENCE, "--slots", "36", "--variants", "exact")
WHOLE = (*PYTHON, "--steps", "18", *CADENCE, "--slots", "36")
"""One phase; two rebalances fit in wherever the tests run."""
FIXED = ("--exchange", "fixed", "--locality", "prefer")
TWO_BY_TWO = ("--pipeline-ranks", "2")
SHAPES = {
    "2 x 2": TWO_BY_TWO,
    "4 x 1": ("--pipeline-ranks", "4"),
    "2 x 2, rows kept at home, exchange of fixed capacity": (*TWO_BY_TWO, *FIXED),
    "2 x 2, handed over in slices": (*TWO_BY_TWO, "--tensor-ranks", "2"),
    "1 x 4, rows kept at home, exchange of fixed capacity": FIXED,
    "1 x 4, in slices of two": ("--tensor-ranks", "2"),
    "2 x 2, three micro-batches, locked": (
        *(*TWO_BY_TWO, "--micro-batches", "3", "--commit", "in_place"),
    ),
}
EVERY = {"unbalanced", "static", "lagged", "exact"}


@pytest.mark.parametrize(
    ("served", "names"),
    [
        pytest.param(
            (*SHORT, *TWO_BY_TWO, *FIXED),
            {"exact"},
            id="2 x 2, rows kept at home, exchange of fixed capacity, exact only",
        ),
        *(
            pytest.param((*WHOLE, *shape), EVERY, id=name, marks=pytest.mark.deep)
            for name, shape in SHAPES.items()
        ),
    ],
)
def test_run_in_stages_keeps_outputs_of_one_process(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    served: tuple[str, ...],
    names: set[str],
) -> None:
    _, out, err = call(capfd, "run", *served, "--quiet", "--out", str(tmp_path))
    figures = json.loads((tmp_path / "summary.json").read_text())
    assert figures["outputs_identical"], out + err
    assert {v["outputs"] for v in figures["variants"].values()} == {figures["reference_outputs"]}
    assert set(figures["variants"]) == names
    assert figures["ranks"] * figures["stages"] == 4
    # On one rank there is nothing to move, and a rebalance that moves nothing is not counted.
    assert (figures["rebalances"] > 0) == (figures["copies"] > 0) == (figures["ranks"] > 1)
    assert figures["rebalances_aborted"] == {}
    assert "4 ranks" in out


def test_run_in_stages_serves_and_reports_given_placement(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, load, plan = tmp_path / "first", tmp_path / "load.csv", tmp_path / "placement.json"
    run_options = (*TABLES, "--steps", "6", *TWO_BY_TWO, "--quiet")
    for words in (
        ("run", *run_options, "--ranks", "2", "--variants", "unbalanced", "--out", str(first)),
        ("record", "--run", str(first), "-o", str(load)),
        ("plan", str(load), "--ranks", "2", "--slots", "40", "-o", str(plan)),
        ("run", *run_options, "--placement", str(plan), "--out", str(tmp_path / "second")),
    ):
        code, _, err = call(capfd, *words)
        assert code == 0, err
    figures = json.loads((tmp_path / "second" / "summary.json").read_text())
    assert figures["outputs_identical"]
    # 0.014 and 0.155; with the placement of other layers in the second stage it would be 0.078.
    assert figures["imbalance_placement"] * 5 < figures["imbalance_unbalanced"]
    report = (tmp_path / "second" / "report.html").read_text()
    assert "4 ranks in 2 stages" in report
