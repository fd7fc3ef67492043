"""`connect` in processes that torchrun, mpiexec or a bare environment made ranks."""

import os
import signal
import subprocess
import sys

import pytest
from helpers.paths import SEARCH_PATH
from helpers.processes.mpi_job import MPIEXEC
from helpers.processes.ports import free_port
from helpers.watchdog import WATCHDOG

PROGRAM = "helpers.rank_programs.connected"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), SEARCH_PATH]))
    inherited = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")
    }
    return {**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def run(*command: str) -> list[str]:
    """Lines that a launcher's ranks print, sorted."""
    completed = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=WATCHDOG, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return sorted(completed.stdout.splitlines())


def on_bare_ranks(what: str) -> list[tuple[int, list[str]]]:
    """Two ranks that nothing but variables made, as Slurm does; exit codes, and lines."""
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", PROGRAM, what],
            env=environment(
                RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=WATCHDOG) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [
        (rank.returncode, out.splitlines()) for rank, (out, _) in zip(ranks, outputs, strict=True)
    ]


def test_ranks_of_torchrun_connect_twice_over_store_of_its_agent() -> None:
    assert run(*TORCHRUN, "--standalone", "-m", PROGRAM, "twice") == [
        f"run {number}: rank {rank} of 2, sum 3" for number in range(2) for rank in range(2)
    ]


def test_ranks_that_torchrun_restarts_forget_loss_of_attempt_before() -> None:
    # With the static rendezvous the agent keeps one store over restarts.
    command = ("--master-port", str(free_port()), "--max-restarts", "1", "-m", PROGRAM, "restarted")
    assert run(*TORCHRUN, *command) == ["lost: None"] * 2 + [
        f"rank {r} of 2, sum 3" for r in (0, 1)
    ]


@pytest.mark.parametrize("what", ["within_torch", "before_torch"])
def test_ranks_of_environment_share_store_with_process_group_of_torch(what: str) -> None:
    lines = {
        "within_torch": ["sums 3 and 3"] * 2,
        "before_torch": [f"rank {rank} of 2, 2 ranks" for rank in range(2)],
    }[what]
    assert on_bare_ranks(what) == [(0, [line]) for line in lines]


def test_first_rank_of_environment_holds_store_for_two_runs() -> None:
    assert on_bare_ranks("twice") == [
        (0, [f"run {number}: rank {rank} of 2, sum 3" for number in range(2)]) for rank in range(2)
    ]


def test_killed_rank_is_named_by_the_one_that_is_left() -> None:
    (code, lines), (killed_code, nothing) = on_bare_ranks("killed")
    assert (killed_code, nothing, code) == (-signal.SIGKILL, [], 0)
    assert lines[0].startswith("rank 1 fell silent")


def test_rank_that_raises_tells_the_others_why() -> None:
    (_, first), (_, second) = on_bare_ranks("raising")
    assert second == ["ValueError: no such checkpoint"]
    assert first[0].startswith("RankLost: rank 1 failed (no such checkpoint)")


def test_ranks_of_mpiexec_connect_over_mpi() -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    lines = run(str(MPIEXEC), "-n", "2", sys.executable, "-m", PROGRAM, "over_mpi")
    assert lines == [f"rank {rank} of 2, sum 3" for rank in range(2)]
