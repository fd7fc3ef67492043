"""`equipoise run` as a user starts it: what it promises."""

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from urllib.request import urlopen

import pytest
from support.ports import free_port
from support.running import finish, start, wait_for_service
from support.trace_format import faults

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
CADENCE = ("--window-size", "2", "--step-interval", "2", "--quiet")
TEXT = str(files("equipoise.demo").joinpath("text", "python.txt"))
SMALL = ("--text", TEXT, "--steps", "14", *CADENCE)
"""One phase; whether two epochs fit in depends on the machine."""
SHORT = ("--text", TEXT, "--steps", "18", *CADENCE)
"""One phase; two epochs fit in wherever the tests run."""
SWITCHING = ("--steps", "54", *CADENCE)
"""Three phases of 18 steps; an epoch takes five or six."""
KEYS = """version backend ranks layers experts slots shares steps tokens phases switch_steps
imbalance_unbalanced imbalance_balanced imbalance_static imbalance_lagged noise_floor epochs
slots_moved slots_total bytes_moved stall_seconds tokens_per_second outputs_identical"""


def test_a_run_can_be_watched_while_it_lasts_and_looked_at_afterwards(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    port, out, trace = free_port(2), tmp_path / "out", tmp_path / "trace.json"
    watched = ("--metrics-port", str(port), "--log-epochs", "--log-balancedness")
    serving = ("--ranks", "2", "--slots", "36", "--steps", "30", *CADENCE[:-1])
    process = start(*serving, *watched, "--trace", str(trace), "--out", str(out))
    try:
        wait_for_service(process, ranks=2)
        for rank in (0, 1):
            with urlopen(f"http://127.0.0.1:{port + rank}/metrics", timeout=30) as answer:
                assert "equipoise_balancedness{" in answer.read().decode()
    finally:
        _, _, told = (process, *finish(process)[1:])
    epochs = json.loads((out / "summary.json").read_text())["epochs"]
    lines = [line for line in told.splitlines() if "equipoise.epochs engine=exact" in line]
    assert sum("outcome=committed" in line for line in lines) == epochs
    assert "equipoise.balancedness engine=exact" in told
    written = json.loads(trace.read_text())
    assert faults(written) == []
    spans = [event for event in written["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert sum(event["name"] == "step" for event in spans) == 60


def test_a_run_moves_experts_and_changes_no_bit(tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    code, out, err = finish(start("--ranks", "4", "--json", str(report), *SWITCHING,
                                  "--out", str(tmp_path)))  # fmt: skip
    assert code == 0, out + err
    figures = json.loads(report.read_text())
    assert set(KEYS.split()) <= set(figures)
    assert out.splitlines()[-1] == "outputs identical: yes"
    assert figures["outputs_identical"] is True
    assert figures["slots_moved"] > 0
    assert figures["imbalance_balanced"] * 2 < figures["imbalance_unbalanced"]
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_a_run_of_one_rank_and_of_two_gives_the_same_outputs(tmp_path: Path) -> None:
    digests = []
    for ranks in ("1", "2"):
        report = tmp_path / f"{ranks}.json"
        finish(start("--ranks", ranks, "--json", str(report), *SMALL, "--out", str(tmp_path)))
        figures = json.loads(report.read_text())
        assert figures["outputs_identical"] is True
        digests.append(figures["reference_outputs"])
    assert digests[0] == digests[1]


def test_one_copy_that_is_not_committed_makes_the_outputs_differ(tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    broken = ("--ranks", "4", "--backend", "support.faulty:FORGETFUL")
    where = ("--json", str(report), "--out", str(tmp_path))
    code, out, _ = finish(start(*broken, *where, *SHORT))
    figures = json.loads(report.read_text())
    assert figures["slots_moved"] > 0
    assert figures["outputs_identical"] is False
    assert "outputs identical: no" in out
    assert code == 1


def test_a_run_that_rewrites_layers_under_locks_changes_no_bit(tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    where = ("--json", str(report), "--out", str(tmp_path))
    code, out, err = finish(start("--ranks", "4", "--commit", "locked", *where, *SHORT))
    assert code == 0, out + err
    figures = json.loads(report.read_text())
    assert figures["slots_moved"] > 0
    assert figures["outputs_identical"] is True


def test_a_run_whose_slots_retire_for_want_of_staging_changes_no_bit(tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    where = ("--json", str(report), "--out", str(tmp_path))
    tight = ("--ranks", "4", "--slots", "48", "--in-flight", "120KiB", "--log-epochs")
    code, out, err = finish(start(*tight, *where, *SHORT[:-1]))
    assert code == 0, out + err
    assert " retired=" in err
    figures = json.loads(report.read_text())
    assert figures["slots_moved"] > 0
    assert figures["outputs_identical"] is True


def test_a_module_beside_the_user_is_not_taken_for_ours(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('wrong random')\n")
    done = subprocess.run(
        [str(Path(sys.executable).with_name("equipoise")), "run", "--ranks", "1", "--steps", "4",
         "--no-balance", "--text", TEXT, "--out", "o", "--json", "f.json", "--quiet"],
        cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert (tmp_path / "f.json").exists(), done.stderr


def test_torchrun_may_start_the_ranks(tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    launched = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m",
         "equipoise", "run", "--ranks", "2", "--json", str(report), *SMALL,
         "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=800, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert report.exists(), launched.stderr
    assert json.loads(report.read_text())["outputs_identical"] is True
