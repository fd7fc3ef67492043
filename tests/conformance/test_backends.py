"""Our own backends keep the contract: the commands that a user would type."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT, SEARCH_PATH
from helpers.records import RecordProperty, add_clauses
from helpers.tiers import DEEP

from equipoise.backends.virtual.profiles import PROFILES

LIMIT = 35_000.0 if DEEP else 850.0
pytestmark = pytest.mark.timeout(LIMIT + 100)
SUITE = (sys.executable, "-m", "equipoise", "conformance", "--quiet")
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or "mpiexec"
HARD = ("--profile", "deep") if DEEP else ()
COMMANDS = {
    "virtual": (*SUITE, "--backend", "virtual", *(HARD or ("--cases", "75"))),
    "cpu, gloo, 4 ranks": (*SUITE, "--backend", "cpu", "--ranks", "4", *HARD),
    "cpu, gloo, 8 ranks": (
        *(*SUITE, "--backend", "cpu", "--ranks", "8"),
        *(HARD or ("--only", "shapes")),
    ),
    "cpu, gloo, 1 rank": (
        *(*SUITE, "--backend", "cpu", "--ranks", "1"),
        *(HARD or ("--only", "shapes", "progress", "determinism", "--cases", "10")),
    ),
    "host, without native code": (
        *(*SUITE, "--backend", "equipoise.backends.cpu.host:HOST", "--ranks", "1"),
        *(HARD or ("--only", "locks", "visibility", "addresses", "kernels", "--cases", "6")),
    ),
    "cpu, MPI, 4 ranks": (
        *(MPIEXEC, "-n", "4", *SUITE),
        *("--backend", "cpu", "--communicator", "mpi", *(HARD or ("--cases", "6"))),
    ),
}
"""What every commit runs; `tox -e deep` runs it with many more cases.

75 on the virtual device: of its 182 broken backends, 172 are rejected by their properties in fewer.
6 on MPI: its ranks wait for each other while they compute, which costs most.
"""
DEEP_COMMANDS = {
    "third party": (*SUITE, "--backend", "equipoise_inline:BACKEND", "--ranks", "4"),
    **{
        f"virtual, {name}": (
            *(*SUITE, "--backend"),
            f"equipoise.backends.virtual.profiles:{name.upper().replace('-', '_')}",
        )
        for name in PROFILES
    },
}
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([SEARCH_PATH, str(ROOT / "examples" / "third_party_backend")]),
}


@pytest.mark.parametrize(
    ("name", "command"),
    [
        *COMMANDS.items(),
        *(pytest.param(*item, marks=pytest.mark.deep) for item in DEEP_COMMANDS.items()),
    ],
    ids=[*COMMANDS, *DEEP_COMMANDS],
)
def test_backend_keeps_the_contract(
    name: str, command: tuple[str, ...], tmp_path: Path, record_property: RecordProperty
) -> None:
    verdicts = tmp_path / "verdicts.json"
    completed = subprocess.run(
        [*command, "--json", str(verdicts)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert completed.returncode == 0, f"{completed.stdout}\n{completed.stderr}"
    verdict_lines = [line for line in completed.stdout.splitlines() if "contract is kept: " in line]
    assert len(verdict_lines) == 1
    add_clauses(record_property, name, command, verdicts)
