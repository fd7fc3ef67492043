"""Our own backends keep the contract: the commands that a user would type."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiers import DEEP

LIMIT = 35_000.0 if DEEP else 850.0
pytestmark = pytest.mark.timeout(LIMIT + 100)
SUITE = (sys.executable, "-m", "equipoise", "conformance", "--quiet")
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or "mpiexec"
COMMANDS = {
    "virtual": (*SUITE, "--backend", "virtual"),
    "cpu, gloo, 4 ranks": (*SUITE, "--backend", "cpu", "--ranks", "4"),
    "cpu, gloo, 8 ranks": (*SUITE, "--backend", "cpu", "--ranks", "8", "--only", "shapes"),
    "cpu, MPI, 4 ranks": (
        *(MPIEXEC, "-n", "4", *SUITE),
        *("--backend", "cpu", "--communicator", "mpi"),
    ),
}
PROFILE = ("--profile", "deep") if DEEP else ()


@pytest.mark.parametrize("name", COMMANDS)
def test_backend_keeps_the_contract(name: str) -> None:
    done = subprocess.run(
        [*COMMANDS[name], *PROFILE], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "contract is kept: " in done.stdout.splitlines()[-1]
