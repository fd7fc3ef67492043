"""`equipoise run` when ranks are lost, and when it is told to end."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from helpers.processes.processes import alive
from helpers.processes.running import finish, start, wait_for_service
from helpers.processes.shared_memory import left_since, segments

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_losing_a_rank_ends_the_run_with_one_line_that_names_it(name: str, tmp_path: Path) -> None:
    shared = segments()
    deadline = 12.0
    process = start("--ranks", "4", "--steps", "60", "--deadline", str(deadline),
                    "--out", str(tmp_path))  # fmt: skip
    ranks = wait_for_service(process, 4)
    os.kill(ranks[2], getattr(signal, name))
    began = time.monotonic()
    code, _, err = finish(process)
    took = time.monotonic() - began
    last = err.splitlines()[-1]
    assert code == 3
    assert last.startswith("equipoise: error: rank 2 ")
    assert "step" in last
    assert "all_to_all" in last or "all_reduce" in last or "vote" in last
    assert "Traceback" not in err
    assert took < deadline
    assert not any(alive(rank) for rank in ranks)
    assert left_since(shared) == set()


def wait_for_reference(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    while "reference" not in (line := process.stderr.readline()):
        assert line, "the run ended before its reference pass"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_losing_the_last_rank_during_the_reference_is_noticed_by_the_launcher(
    name: str, tmp_path: Path
) -> None:
    deadline = 40.0
    process = start("--ranks", "2", "--steps", "24", "--no-balance", "--deadline", str(deadline),
                    "--out", str(tmp_path))  # fmt: skip
    (first, *_) = wait_for_service(process, 2)
    wait_for_reference(process)
    os.kill(first, getattr(signal, name))
    began = time.monotonic()
    code, _, err = finish(process)
    assert time.monotonic() - began < deadline
    assert code == 3
    last = err.splitlines()[-1]
    assert last.startswith("equipoise: error: rank 0 ")
    assert last.endswith("during the reference pass")


def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    process = start("--ranks", "2", "--steps", "60", "--out", str(tmp_path))
    ranks = wait_for_service(process, 2)
    process.kill()
    process.communicate(timeout=30)
    expiry = time.monotonic() + 20
    while any(alive(rank) for rank in ranks) and time.monotonic() < expiry:
        time.sleep(0.05)
    assert not any(alive(rank) for rank in ranks)


def test_an_interrupt_ends_every_rank_with_one_line(tmp_path: Path) -> None:
    process = start("--ranks", "2", "--steps", "60", "--out", str(tmp_path))
    ranks = wait_for_service(process, 2)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130
    assert "Traceback" not in err
    assert not any(alive(rank) for rank in ranks)
