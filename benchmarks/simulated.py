"""Runs the Ascend backend over the simulated driver at full strength, and keeps what was seen.

    python benchmarks/simulated.py suites      the conformance suite, each schedule: ten minutes
    python benchmarks/simulated.py broken      eleven broken backends, twenty times each: as long
    python benchmarks/simulated.py races       the race table of the simulator: two minutes
    python benchmarks/simulated.py jobs        the main job on 2 and 4 ranks: half an hour

For the environment of tox's `npusim`, which holds torch_npu. Writes
benchmarks/results/simulated_{suites,broken,races,jobs}.json, of which
`python benchmarks/simulated_page.py` makes docs/ascend-results.md. No figure here is a speed: what
runs is a simulation.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

THEIRS = dict(os.environ)
"""The environment of what is measured."""
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = (
    "0"  # no driver is found in this process itself, and torch would fail
)
from evidence import ROOT, save  # noqa: E402

SUITE = ("-m", "equipoise", "conformance", "--quiet", "--backend", "ascend")
STEERED = ("--ranks", "1", "--steer", "npusim.steering:steer")
SUITES = {
    "eager": ("--ranks", "4"),
    "delay": ("--ranks", "4"),
    "lazy": ("--ranks", "4"),
    "explore": STEERED,
}
"""The options of the suite, by schedule."""
JOB = ("-m", "equipoise", "run", "--quiet", "--backend", "ascend", "--ranks")
JOBS = (2, 4)
Figures = dict[str, Any]


def over(schedule: str, *program: str) -> list[str]:
    """That program of Python over the simulated driver."""
    driver = ("-m", "npusim", "--schedule", schedule, "--")
    return [sys.executable, *driver, sys.executable, *program]


def measured(command: Sequence[str]) -> tuple[Figures, int]:
    """What it wrote with `--json`, and its exit code. Raises RuntimeError when it wrote nothing."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        own = {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
        told = subprocess.run(
            [*command, "--json", str(out)],
            cwd=folder,
            env={**THEIRS, **own},
            capture_output=True,
            text=True,
            check=False,
        )
        if not out.exists():
            raise RuntimeError(f"{shown(command)} ended with {told.returncode}: {told.stderr}")
        figures: Figures = json.loads(out.read_text())
    sys.stderr.write(f"{shown(command)}: exit code {told.returncode}\n{told.stderr}")
    return figures, told.returncode


def shown(command: Sequence[str]) -> str:
    """As somebody would type it."""
    words = ["python" if word == sys.executable else word for word in command]
    return shlex.join(words).replace("python -m equipoise", "equipoise")


def suites() -> Figures:
    """The conformance suite on every schedule."""
    figures = {}
    for schedule, options in SUITES.items():
        command = over(schedule, *SUITE, *options)
        verdicts, code = measured(command)
        figures[schedule] = {
            "command": shown(command),
            "exit_code": code,
            "seconds": verdicts["seconds"],
            "clauses": {clause: found["status"] for clause, found in verdicts["clauses"].items()},
        }
    return figures


def broken() -> Figures:
    """How often each broken backend was caught."""
    figures, code = measured(over("lazy", "-m", "devices.conformance.trial"))
    return {**figures, "exit_code": code}


def races() -> Figures:
    """How often each race was correct."""
    figures, code = measured([sys.executable, "-m", "npusim.selftest.races"])
    return {"correct": figures, "exit_code": code}


def jobs() -> Figures:
    """The main job at its full length."""
    figures = {}
    for ranks in JOBS:
        command = over("eager", *JOB, str(ranks))
        record, code = measured(command)
        figures[str(ranks)] = {"command": shown(command), "exit_code": code, **record}
    return figures


def main() -> None:
    """Do what the command line says."""
    known = {"suites": suites, "broken": broken, "races": races, "jobs": jobs}
    if len(sys.argv) != 2 or sys.argv[1] not in known:
        sys.exit(f"usage: python benchmarks/simulated.py {'|'.join(known)}")
    job = sys.argv[1]
    save(f"simulated_{job}", ["python", "benchmarks/simulated.py", job], known[job]())


if __name__ == "__main__":
    main()
