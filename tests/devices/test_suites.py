"""The conformance suite on the simulated NPU, the broken backends that it must reject, and a run.

Each command has processes of its own, with a simulated driver on the schedule that it names. The
schedule `lazy` comes first: it shows every planted race in each of 20 runs, `delay` two thirds of
them, `eager` one (docs/design/simulated-driver.md).
"""

import os
import sys
from pathlib import Path

import pytest
from devices.simulator.running import launch
from helpers.paths import TESTS
from helpers.tiers import DEEP

pytestmark = [
    pytest.mark.timeout(36_000 if DEEP else 900),
    pytest.mark.skipif(
        "NPUSIM_SCHEDULE" not in os.environ, reason="no simulated driver: see devices/launch.py"
    ),
]
LIMIT = 35_000.0 if DEEP else 850.0
EQUIPOISE = (sys.executable, "-m", "equipoise")
ASCEND = ("--backend", "ascend", "--ranks", "4")
NCCL = (
    *("--backend", "cudasim:BACKEND", "--communicator", "cudasim.nccl:NCCL", "--ranks", "4"),
    *("--only", "progress", "shapes", "keepalive", "failures", "determinism", "faults"),
)
"""What is NCCL's own, over a stand-in for NCCL."""
STEERED = (
    *("--backend", "ascend", "--ranks", "1", "--steer", "npusim.steering:steer"),
    *("--only", "ordering", "locks", "visibility", "addresses", "kernels", "resources"),
)
"""What takes one device, where hypothesis chooses the schedule as well."""
FEW = () if DEEP else ("--cases", "3")
LAZY = "lazy"
MORE = [pytest.param(name, marks=pytest.mark.deep) for name in ("eager", "delay")]


def over(schedule: str, *command: str) -> str:
    """What a command prints that has to end well."""
    outcome = launch("--schedule", schedule, "--", *command, limit=LIMIT)
    assert outcome.code == 0, f"{outcome.out}\n{outcome.err}"
    return outcome.out


def kept(schedule: str, *arguments: str) -> None:
    told = over(schedule, *EQUIPOISE, "conformance", "--quiet", *arguments, *FEW)
    assert "contract is kept: " in told.splitlines()[-1]


@pytest.mark.parametrize("schedule", [LAZY, *MORE])
def test_ascend_backend_keeps_the_contract(schedule: str) -> None:
    kept(schedule, *ASCEND)


@pytest.mark.deep
def test_ascend_backend_keeps_the_contract_on_drawn_schedules() -> None:
    kept("explore", *STEERED)


@pytest.mark.parametrize("schedule", [LAZY, *MORE, pytest.param("explore", marks=pytest.mark.deep)])
def test_nccl_communicator_keeps_the_contract(schedule: str) -> None:
    kept(schedule, *NCCL)


@pytest.mark.parametrize("kind", ["ascend", pytest.param("nccl", marks=pytest.mark.deep)])
def test_suite_rejects_every_broken_backend(kind: str) -> None:
    runs = () if DEEP else ("--runs", "3", "--rank-runs", "1", "--healthy", "0")
    over(LAZY, sys.executable, "-m", "devices.conformance.trial", "--of", kind, *runs)


def test_driver_schedule_shows_every_planted_race() -> None:
    over(LAZY, sys.executable, "-m", "npusim.selftest.races", "--schedules", LAZY)


def test_run_on_simulated_ranks_changes_no_output(tmp_path: Path) -> None:
    if DEEP:
        for ranks in ("2", "4"):
            files = ("--quiet", "--out", str(tmp_path / ranks))
            over("eager", *EQUIPOISE, "run", "--backend", "ascend", "--ranks", ranks, *files)
    else:
        over("eager", sys.executable, str(TESTS / "devices" / "conformance" / "serve.py"), "2")
