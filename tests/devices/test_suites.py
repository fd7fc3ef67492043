"""The conformance suite on the simulated NPU, the broken backends that it must reject, and a run.

Each command has processes of its own, with a simulated driver on the schedule that it names. The
schedule `lazy` comes first: it shows every planted race in each of 20 runs, `delay` two thirds of
them, `eager` one (docs/design/simulated-driver.md).
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from devices.simulator.simulated_program import launch
from helpers.paths import TESTS
from helpers.records import RecordProperty, add_clauses, add_row
from helpers.tiers import DEEP
from npusim.selftest import races

pytestmark = [
    pytest.mark.timeout(36_000 if DEEP else 900),
    pytest.mark.skipif(
        "NPUSIM_SCHEDULE" not in os.environ, reason="no simulated driver: see devices/launch.py"
    ),
]
LIMIT = 35_000.0 if DEEP else 850.0
EQUIPOISE = (sys.executable, "-m", "equipoise")
ASCEND = ("--backend", "ascend", "--ranks", "4")
ONE_DEVICE = ("--only", "ordering", "locks", "visibility", "addresses", "kernels", "resources")
CUDASIM = ("--backend", "cudasim:BACKEND", "--communicator", "cudasim.nccl:NCCL")
CUDA = (*CUDASIM, "--ranks", "1", *ONE_DEVICE)
"""The CUDA backend where torch.npu plays torch.cuda; what takes one device."""
NCCL = (
    *(*CUDASIM, "--ranks", "4"),
    *("--only", "progress", "shapes", "keepalive", "failures", "determinism", "faults"),
)
"""What is NCCL's own, over a stand-in for NCCL."""
STEERED = (
    "--backend",
    "ascend",
    "--ranks",
    "1",
    "--schedule-from",
    "npusim.steering:steer",
    *ONE_DEVICE,
)
"""What takes one device, where hypothesis chooses the schedule as well."""
EXPERT_LIBRARIES = {
    "equipoise.pipeline.all_to_all.expert_parallel:FIXED_CAPACITY": "2",
    "equipoise.pipeline.all_to_all.expert_parallel:VARIABLE_SIZE": "2",
    "conformance.mutants.expert_libraries:LONE": "1",
}
"""Our exchange as expert-parallel libraries, by number of ranks; the last one in graphs."""
FEW = () if DEEP else ("--cases", "3")
LAZY = "lazy"
MORE = [pytest.param(name, marks=pytest.mark.deep) for name in ("eager", "delay")]


ACCELERATOR = ("--backend", "accelerator:npu")
"""What torch_npu is as torch drives it, by itself."""
DEVIATIONS = {"an-unrecorded-event-cannot-be-waited-for": "O3"}
"""What is known of it, by property: docs/foreign-accelerators.md."""


class Judge:
    """Runs commands over the simulated driver that have to end well, and records what they found.

    Args:
        folder: for the figures that a command writes.
        record: pytest's `record_property`.
    """

    def __init__(self, folder: Path, record: RecordProperty) -> None:
        self.folder = folder
        self._figures = folder / "figures.json"
        self._record = record

    def run(self, schedule: str, *command: str) -> tuple[str, Any]:
        """What a command prints, and the figures that it writes with `--json`."""
        whole = (*command, "--json", str(self._figures))
        outcome = launch("--schedule", schedule, "--", *whole, limit=LIMIT)
        assert outcome.code == 0, f"{outcome.out}\n{outcome.err}"
        return outcome.out, json.loads(self._figures.read_text("utf-8"))

    def keeps(self, name: str, schedule: str, *arguments: str) -> None:
        """A backend keeps the contract."""
        suite = (*EQUIPOISE, "conformance", "--quiet", *arguments, *FEW)
        output, _ = self.run(schedule, *suite)
        assert len([line for line in output.splitlines() if "contract is kept: " in line]) == 1
        driver = ("python", "-m", "npusim", "--schedule", schedule, "--")
        add_clauses(self._record, f"{name}, {schedule}", (*driver, *suite), self._figures)

    def add(self, table: str, **cells: object) -> None:
        """Add a row to a table of docs/deep-results.md."""
        add_row(self._record, table, cells)


@pytest.fixture
def judge(tmp_path: Path, record_property: RecordProperty) -> Judge:
    return Judge(tmp_path, record_property)


@pytest.mark.parametrize("schedule", [LAZY, *MORE])
def test_ascend_backend_keeps_the_contract(judge: Judge, schedule: str) -> None:
    judge.keeps("ascend", schedule, *ASCEND)


@pytest.mark.parametrize("schedule", [LAZY, *MORE])
def test_torch_npu_has_known_deviations_only(tmp_path: Path, schedule: str) -> None:
    figures = tmp_path / "figures.json"
    suite = (*EQUIPOISE, "conformance", "--quiet", *ACCELERATOR, *FEW, "--json", str(figures))
    outcome = launch("--schedule", schedule, "--", *suite, limit=LIMIT)
    assert outcome.code == 1, f"{outcome.out}\n{outcome.err}"
    rows = json.loads(figures.read_text("utf-8"))["properties"]
    violated = {row["property"]: row["clause"] for row in rows if row["status"] == "violated"}
    assert violated == DEVIATIONS


@pytest.mark.deep
def test_ascend_backend_keeps_the_contract_on_drawn_schedules(judge: Judge) -> None:
    judge.keeps("ascend", "explore", *STEERED)


@pytest.mark.parametrize("schedule", [LAZY, *MORE])
@pytest.mark.parametrize(("library", "ranks"), EXPERT_LIBRARIES.items(), ids=EXPERT_LIBRARIES)
def test_expert_exchange_keeps_the_contract(
    judge: Judge, library: str, ranks: str, schedule: str
) -> None:
    arguments = ("--backend", "ascend", "--ranks", ranks, "--expert-parallel", library)
    judge.keeps(f"ascend, {library.partition(':')[2].lower()}", schedule, *arguments)


@pytest.mark.parametrize("schedule", [LAZY, *MORE])
def test_cuda_backend_keeps_the_contract(judge: Judge, schedule: str) -> None:
    judge.keeps("cuda over the simulator", schedule, *CUDA)


@pytest.mark.parametrize("schedule", [LAZY, *MORE, pytest.param("explore", marks=pytest.mark.deep)])
def test_nccl_communicator_keeps_the_contract(judge: Judge, schedule: str) -> None:
    judge.keeps("cuda over the simulator, nccl", schedule, *NCCL)


@pytest.mark.parametrize(
    "kind",
    [
        "ascend",
        "accelerator",
        *(
            pytest.param(kind, marks=pytest.mark.deep)
            for kind in ("ascend-kernels-and-slots", "cuda-slots", "nccl")
        ),
    ],
)
def test_suite_rejects_every_broken_backend(judge: Judge, kind: str) -> None:
    runs = () if DEEP else ("--runs", "3", "--rank-runs", "1", "--healthy", "0")
    _, report = judge.run(
        LAZY, sys.executable, "-m", "devices.conformance.trial", "--of", kind, *runs
    )
    for row in report["broken"]:
        judge.add("broken backends", **broken_row(kind, row))
    if report["healthy"]:
        alarms, tried = (sum(row[name] for row in report["healthy"]) for name in ("caught", "runs"))
        judge.add("broken backends", of=kind, broken="none", caught=f"{alarms} of {tried}")


def broken_row(kind: str, row: dict[str, Any]) -> dict[str, object]:
    """How often a broken backend was caught, for the page."""
    return {
        "of": kind,
        "broken": row["name"],
        "caught": f"{row['caught']} of {row['runs']}",
        "what it does instead": row["instead"],
        "ranks": row["ranks"],
        "rejected by": row["property"],
    }


def test_driver_schedule_shows_every_planted_race(judge: Judge) -> None:
    schedules = races.SINGLE if DEEP else (LAZY,)
    _, table = judge.run(
        LAZY, sys.executable, "-m", "npusim.selftest.races", "--schedules", *schedules
    )
    for case in table[LAZY]:
        right = {schedule: table[schedule].get(case, "·") for schedule in schedules}
        judge.add("races", race=case.replace("/", ", "), **right)


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.deep) for n in (2, 4)])
def test_default_run_on_simulated_ranks_changes_no_output(judge: Judge, ranks: int) -> None:
    files = ("--quiet", "--out", str(judge.folder / "run"))
    command = (*EQUIPOISE, "run", "--backend", "ascend", "--ranks", str(ranks))
    _, figures = judge.run("eager", *command, *files)
    assert figures["outputs_identical"]
    judge.add("runs", **run_row(figures))


def run_row(figures: dict[str, Any]) -> dict[str, object]:
    """What came of a run, for the page."""
    return {
        "backend": figures["backend"],
        "ranks": figures["ranks"],
        "outputs identical": "yes" if figures["outputs_identical"] else "no",
        "rebalances": figures["rebalances"],
        "slots moved": figures["copies"],
        "imbalance without": round(figures["imbalance_unbalanced"], 4),
        "with": round(figures["imbalance_balanced"], 4),
    }


def test_run_on_simulated_ranks_changes_no_output() -> None:
    serve = (sys.executable, str(TESTS / "devices" / "conformance" / "serve.py"), "2")
    outcome = launch("--schedule", "eager", "--", *serve, limit=LIMIT)
    assert outcome.code == 0, f"{outcome.out}\n{outcome.err}"
