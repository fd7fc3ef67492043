"""`equipoise run` as a user starts it: what it promises."""

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from helpers.harnesses.trace_format import faults
from helpers.processes.ports import free_port
from helpers.processes.run_command import call, finish, start, wait_for_service

pytestmark = pytest.mark.timeout(900)
TEXTS = files("equipoise.demo").joinpath("text")
CADENCE = ("--window-size", "2", "--step-interval", "2")
TABLES = ("--text", str(TEXTS.joinpath("tables.txt")))
FEW = ("--ranks", "2", "--slots", "34", *TABLES, *CADENCE)
"""Few redundant slots: on two ranks experts move in the first rebalances."""
SHORT = (*FEW, "--steps", "14", "--variants", "exact", "--quiet")
"""One phase, one variant; how many rebalances fit in depends on the machine."""
PYTHON = ("--text", str(TEXTS.joinpath("python.txt")))
FOUR = ("--ranks", "4", *PYTHON, *CADENCE, "--steps", "18", "--quiet")
"""The same on four ranks, every variant."""
SWITCHING = ("--ranks", "4", *CADENCE, "--steps", "54", "--quiet")
"""Three phases of 18 steps; a rebalance takes five or six."""
KEYS = """version backend ranks layers experts slots shares steps tokens phases switch_steps
imbalance_unbalanced imbalance_balanced imbalance_static imbalance_lagged noise_floor rebalances
copies slots_total bytes_moved stall_seconds tokens_per_second outputs_identical"""


def exit_code_of(figures: dict[str, Any]) -> int:
    """Of a run with these figures and identical outputs: 1 after too few committed rebalances."""
    return 0 if figures["not_exercised"] is None else 1


short_or_four = pytest.mark.parametrize(
    "served",
    [
        pytest.param(SHORT, id="2 ranks, exact"),
        pytest.param(FOUR, id="4 ranks, every variant", marks=pytest.mark.deep),
    ],
)


def test_run_exports_metrics_rebalance_log_and_trace(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    port, out, trace = free_port(2), tmp_path / "out", tmp_path / "trace.json"
    log_options = ("--metrics-port", str(port), "--log-rebalances", "--log-balancedness")
    serving = (*FEW, "--steps", "16", "--variants", "unbalanced", "exact")
    process = start(*serving, *log_options, "--trace", str(trace), "--out", str(out))
    try:
        wait_for_service(process, ranks=2)
        for rank in (0, 1):
            with urlopen(f"http://127.0.0.1:{port + rank}/metrics", timeout=30) as answer:
                assert "equipoise_balancedness{" in answer.read().decode()
    finally:
        code, _, log_text = finish(process)
    figures = json.loads((out / "summary.json").read_text())
    assert code == exit_code_of(figures), log_text
    rebalances = figures["rebalances"]
    lines = [line for line in log_text.splitlines() if "equipoise.rebalances engine=exact" in line]
    assert sum("outcome=committed" in line for line in lines) == rebalances > 0
    assert "equipoise.balancedness engine=exact" in log_text
    trace_json = json.loads(trace.read_text())
    assert faults(trace_json) == []
    spans = [event for event in trace_json["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert sum(event["name"] == "step" for event in spans) == 2 * 16


@pytest.mark.parametrize(
    ("served", "names"),
    [
        pytest.param(
            (*FEW, "--steps", "14", "--variants", "unbalanced", "exact", "--quiet"),
            {"unbalanced", "exact"},
            id="2 ranks, one phase, before and after",
        ),
        pytest.param(
            SWITCHING,
            {"unbalanced", "static", "lagged", "exact"},
            id="4 ranks, three phases, every variant",
            marks=pytest.mark.deep,
        ),
    ],
)
def test_run_moves_experts_and_keeps_outputs_bit_identical(
    tmp_path: Path, served: tuple[str, ...], names: set[str]
) -> None:
    report = tmp_path / "figures.json"
    code, out, err = finish(start("--json", str(report), *served, "--out", str(tmp_path)))
    figures = json.loads(report.read_text())
    assert code == exit_code_of(figures), out + err
    assert set(KEYS.split()) <= set(figures)
    assert out.splitlines()[-1].startswith("outputs identical: yes")
    assert figures["outputs_identical"] is True
    assert set(figures["variants"]) == names
    assert {v["outputs"] for v in figures["variants"].values()} == {figures["reference_outputs"]}
    assert figures["copies"] > 0
    assert figures["imbalance_balanced"] * 2 < figures["imbalance_unbalanced"]
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_run_outputs_are_equal_on_one_and_two_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for ranks in ("1", "2"):
        report = tmp_path / f"{ranks}.json"
        where = ("--json", str(report), "--out", str(tmp_path))
        few = (*CADENCE, "--steps", "4", "--variants", "exact", "--quiet")
        code, out, err = call(capfd, "run", "--ranks", ranks, *TABLES, *few, *where)
        figures = json.loads(report.read_text())
        assert figures["outputs_identical"] is True
        assert code == exit_code_of(figures), out + err
        outputs.append((figures["reference_outputs"], figures["variants"]["exact"]["outputs"]))
    assert outputs[0] == outputs[1]


@short_or_four
def test_run_reports_different_outputs_when_a_copy_is_not_committed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], served: tuple[str, ...]
) -> None:
    report = tmp_path / "figures.json"
    where = ("--json", str(report), "--out", str(tmp_path))
    code, out, _ = call(
        capfd, "run", *served, "--backend", "helpers.fakes.forgetful_backend:FORGETFUL", *where
    )
    figures = json.loads(report.read_text())
    assert figures["copies"] > 0
    assert figures["outputs_identical"] is False
    assert "outputs identical: no" in out
    assert code == 1


@short_or_four
def test_run_with_in_place_commit_keeps_outputs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], served: tuple[str, ...]
) -> None:
    report = tmp_path / "figures.json"
    where = ("--json", str(report), "--out", str(tmp_path))
    code, out, err = call(capfd, "run", *served, "--commit", "in_place", *where)
    figures = json.loads(report.read_text())
    assert code == exit_code_of(figures), out + err
    assert figures["copies"] > 0
    assert figures["outputs_identical"] is True


@pytest.mark.parametrize(
    "served",
    [
        pytest.param((*SHORT, "--slots", "36"), id="2 ranks, exact"),
        pytest.param((*FOUR, "--slots", "48"), id="4 ranks, every variant", marks=pytest.mark.deep),
    ],
)
def test_run_with_little_staging_keeps_outputs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], served: tuple[str, ...]
) -> None:
    report = tmp_path / "figures.json"
    where = ("--json", str(report), "--out", str(tmp_path))
    code, out, err = call(
        capfd, "run", *served, "--staging-bytes", "120KiB", "--log-rebalances", *where
    )
    figures = json.loads(report.read_text())
    assert code == exit_code_of(figures), out + err
    assert figures["copies"] > 0
    assert figures["outputs_identical"] is True


def test_run_ignores_modules_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('wrong random')\n")
    completed = subprocess.run(
        [str(Path(sys.executable).with_name("equipoise")), "run", "--ranks", "1", "--steps", "1",
         "--variants", "unbalanced", *TABLES, "--out", "o", "--json", "f.json", "--quiet"],
        cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    assert (tmp_path / "f.json").exists()


def test_run_under_torchrun_keeps_outputs_identical(tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    few = (*FEW, "--steps", "4", "--variants", "exact", "--quiet")
    completed = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m",
         "equipoise", "run", "--json", str(report), *few,
         "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=800, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    figures = json.loads(report.read_text())
    assert figures["outputs_identical"] is True
    expected = exit_code_of(figures)
    assert completed.returncode == expected, completed.stderr
