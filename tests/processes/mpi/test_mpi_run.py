"""`equipoise run` and `record` on ranks that mpiexec has started."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes.mpi_job import MPIEXEC

from equipoise.balancer.formats import read_statistics

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

BOUND = 800.0


def mpiexec(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`equipoise` with these arguments, on two ranks over MPI."""
    return subprocess.run(
        [str(MPIEXEC), "-n", "2", sys.executable, "-m", "equipoise", *arguments,
         "--communicator", "mpi"],
        cwd=folder, capture_output=True, text=True, timeout=BOUND, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_run_under_mpiexec_keeps_outputs_identical(tmp_path: Path) -> None:
    completed = mpiexec(
        tmp_path, "run", "--ranks", "2", "--steps", "4", "--window-size", "1", "--step-interval",
        "2", "--variants", "exact", "--json", "figures.json", "--quiet",
    )  # fmt: skip
    assert "Traceback" not in completed.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["communicator"], figures["ranks"]) == ("mpi", 2)
    assert figures["outputs_identical"] is True
    assert completed.stdout.count("outputs identical: yes") == 1  # told by rank 0 alone


@pytest.mark.deep
def test_record_under_mpiexec_writes_one_folder(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("All that is even is at peace. " * 40)
    completed = mpiexec(
        tmp_path, "record", "--ranks", "2", "--steps", "4", "--text", "text", "-o", "at"
    )
    assert (completed.returncode, completed.stdout.count("recorded steps 0 to 3 on 2 ranks")) == (
        0,
        1,
    )
    statistics = read_statistics(tmp_path / "at")
    assert statistics.by_rank is not None
    assert len(statistics.by_rank) == 2


def test_run_under_mpiexec_refuses_other_rank_count(tmp_path: Path) -> None:
    completed = mpiexec(tmp_path, "run", "--ranks", "4")
    assert completed.returncode == 2
    assert set(completed.stderr.splitlines()) == {
        "equipoise: error: --ranks 4: the launcher has started 2: give --ranks that"
    }
