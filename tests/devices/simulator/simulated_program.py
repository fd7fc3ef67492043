"""Runs a program of `programs/` over the simulated driver, in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.paths import SEARCH_PATH

PROGRAMS = Path(__file__).resolve().parent / "programs"
LIMIT = 100.0
"""Seconds that a program may take."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def facts(self) -> dict[str, Any]:
        """The JSON object that the program printed last."""
        assert self.code == 0, self.err
        facts: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return facts


def run_program(
    name: str,
    schedule: str,
    *options: str,
    arguments: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run `programs/NAME.py` under a schedule; `options` are the launcher's."""
    program = (sys.executable, str(PROGRAMS / f"{name}.py"), *arguments)
    return launch("--schedule", schedule, *options, "--", *program, environment=environment)


def launch(
    *arguments: str, environment: Mapping[str, str] | None = None, limit: float = LIMIT
) -> Outcome:
    """Run the launcher itself."""
    completed = subprocess.run(
        [sys.executable, "-m", "npusim", *arguments],
        env={**os.environ, "PYTHONPATH": SEARCH_PATH, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    return Outcome(completed.returncode, completed.stdout, completed.stderr)
