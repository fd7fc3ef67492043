"""`equipoise run` when ranks are lost, and when it is told to end."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from helpers.processes.process_state import alive
from helpers.processes.run_command import finish, start, wait_for_service
from helpers.processes.shared_memory import left_since, segments

pytestmark = pytest.mark.timeout(900)
LOSSES = {"SIGKILL": "was killed by SIGKILL", "SIGSTOP": "fell silent"}
"""What the last line says became of a rank, by the signal that it was sent."""
DEADLINE = 30.0
"""Seconds. A tenth of it is what ranks get to say what they were doing."""


@pytest.mark.parametrize("name", LOSSES)
def test_run_names_lost_rank_in_one_line_and_exits_3(name: str, tmp_path: Path) -> None:
    segments_before = segments()
    process = start("--ranks", "4", "--steps", "60", "--deadline", str(DEADLINE),
                    "--out", str(tmp_path))  # fmt: skip
    ranks = wait_for_service(process, 4)
    os.kill(ranks[2], getattr(signal, name))
    code, _, err = finish(process)
    last = err.splitlines()[-1]
    assert code == 3
    assert last.startswith(f"equipoise: error: rank 2 {LOSSES[name]} ")
    assert "step" in last
    assert "all_to_all" in last or "all_reduce" in last or "vote" in last
    assert "Traceback" not in err
    assert not any(alive(rank) for rank in ranks)
    assert left_since(segments_before) == set()


def wait_for_reference(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    while "reference" not in (line := process.stderr.readline()):
        assert line, "the run ended before its reference pass"


@pytest.mark.parametrize("name", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.deep)])
def test_run_launcher_names_rank_lost_during_reference_pass(name: str, tmp_path: Path) -> None:
    process = start(
        "--ranks", "2", "--steps", "24", "--variants", "unbalanced", "--out", str(tmp_path)
    )
    (first, *_) = wait_for_service(process, 2)
    wait_for_reference(process)
    os.kill(first, getattr(signal, name))
    code, _, err = finish(process)
    assert code == 3
    last = err.splitlines()[-1]
    assert last.startswith(f"equipoise: error: rank 0 {LOSSES[name]} ")
    assert last.endswith("during the reference pass")


def test_run_ranks_end_with_killed_launcher(tmp_path: Path) -> None:
    process = start("--ranks", "2", "--steps", "60", "--out", str(tmp_path))
    ranks = wait_for_service(process, 2)
    process.kill()
    process.communicate(timeout=200)
    expiry = time.monotonic() + 200
    while any(alive(rank) for rank in ranks) and time.monotonic() < expiry:
        time.sleep(0.05)
    assert not any(alive(rank) for rank in ranks)


def test_run_interrupt_ends_every_rank_and_exits_130(tmp_path: Path) -> None:
    process = start("--ranks", "2", "--steps", "60", "--out", str(tmp_path))
    ranks = wait_for_service(process, 2)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130
    assert "Traceback" not in err
    assert not any(alive(rank) for rank in ranks)
