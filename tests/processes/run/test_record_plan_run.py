"""The loop of an operator on the shipped model: record, plan, serve what was planned, report."""

import json
import os
import signal
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from importlib.resources import files
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from helpers.processes.rank_pool import Ranks
from helpers.rank_programs import placement_files as given

from equipoise.balancer.formats import (
    IterationRange,
    RoutingTrace,
    read_statistics,
    read_trace,
)
from equipoise.cli.main import main

pytestmark = pytest.mark.timeout(900)
TEXT = str(files("equipoise.demo").joinpath("text", "tables.txt"))
TRAFFIC = ("--text", TEXT, "--steps", "12", "--ranks", "2")
MOVING = ("--slots", "34", "--window-size", "2", "--step-interval", "2")
"""Few redundant slots: on two ranks experts move in the first rebalances."""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "equipoise", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def call(folder: Path, *arguments: str) -> str:
    """What a command prints that works, called in this process, which has imported torch."""
    out = StringIO()
    with chdir(folder), redirect_stdout(out):
        assert main(arguments) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def recorded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `record` writes."""
    folder = tmp_path_factory.mktemp("loop")
    call(folder, "record", *TRAFFIC, "-o", "recorded")
    return folder / "recorded"


def test_recorded_tokens_sum_to_recorded_counts(tmp_path: Path, recorded_folder: Path) -> None:
    """The same traffic on another number of ranks: routing does not depend on the batch."""
    traffic = (*TRAFFIC[:-1], "4")
    call(tmp_path, "record", *traffic, "--format", "vllm-routed", "-o", "tokens")
    trace = read_trace(tmp_path / "tokens")
    assert isinstance(trace, RoutingTrace)
    counts = read_statistics(recorded_folder).counts.sum(axis=0)
    ids = np.concatenate([part.ids for part in trace.parts()])
    for layer in range(counts.shape[0]):
        assert np.array_equal(np.bincount(ids[:, layer].ravel(), minlength=32), counts[layer])


def test_record_plan_run_and_report_agree(tmp_path: Path, recorded_folder: Path) -> None:
    call(tmp_path, "report", str(recorded_folder))
    call(
        tmp_path,
        "plan",
        str(recorded_folder),
        "--ranks",
        "2",
        "--slots",
        "36",
        "-o",
        "placement.json",
    )
    placement_options = ("--placement", "placement.json")
    out = call(tmp_path, "run", *placement_options, *TRAFFIC, "--out", "served")
    call(tmp_path, "record", "--run", "served", "-o", "served.npz")
    call(tmp_path, "report", "served.npz", *placement_options, "--json", "again.json")

    served_statistics = read_statistics(tmp_path / "served.npz")
    assert np.array_equal(read_statistics(recorded_folder).counts, served_statistics.counts)
    figures = json.loads((tmp_path / "served" / "summary.json").read_text())
    spread = json.loads((tmp_path / "again.json").read_text())["served"]
    before, after = (
        spread[name]["by_rank"]["average"]["imbalance"] for name in ("linear", "placement")
    )
    assert out.splitlines()[-1] == "outputs identical: yes"
    assert set(figures["variants"]) == {"unbalanced", "placement"}
    assert figures["slots"] == 36
    assert figures["imbalance_unbalanced"] == pytest.approx(before)
    # Single tokens choose among copies by chance; the report divides exactly.
    assert figures["imbalance_placement"] == pytest.approx(after, abs=figures["noise_floor"])
    assert figures["imbalance_placement"] < figures["imbalance_unbalanced"]


def test_recorded_statistics_do_not_depend_on_balancing(
    tmp_path: Path, recorded_folder: Path
) -> None:
    call(
        tmp_path, "record", *TRAFFIC, "--range", "4-11", *MOVING, "--balance", "on", "-o", "moving"
    )
    still = read_statistics(recorded_folder).select_iterations(IterationRange(4, 11))
    assert still.same(read_statistics(tmp_path / "moving"))
    assert still.by_rank is not None
    assert still.by_rank.shape == (2, 7, 6, 32)
    assert still.by_rank.sum(axis=(1, 2, 3)).all()


@pytest.mark.deep
def test_record_under_torchrun_writes_one_folder(tmp_path: Path, recorded_folder: Path) -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m",
         "equipoise", "record", *TRAFFIC, "-o", "theirs"],
        cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.count("recorded steps 0 to 11 on 2 ranks") == 1
    assert read_statistics(recorded_folder).same(read_statistics(tmp_path / "theirs"))


def test_record_ends_without_output_when_a_rank_is_lost(tmp_path: Path) -> None:
    process = start(tmp_path, "record", "--steps", "60", "--ranks", "2", "-o", "recorded",
                    "--deadline", "12")  # fmt: skip
    assert process.stderr is not None
    assert "steps" in process.stderr.readline()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    out, err = process.communicate(timeout=800)
    assert process.returncode == 3
    assert err.splitlines()[-1].startswith("equipoise: error: rank 1 ")
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_placement_files_that_differ_between_ranks_are_refused(ranks: Ranks) -> None:
    assert [answer["error"] for answer in ranks.run(given.compare, 3, odd=-1)] == [""] * 3
    for answer in ranks.run(given.compare, 3, odd=2):
        assert answer["error"] == "PlacementError"
        assert "rank 2 was given another placement than rank 0" in answer["text"]
