"""The reference, computed once; and every mode of vLLM, run once however many tests ask."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from vllm_runs.case import Case
from vllm_runs.expected import Reference, read
from vllm_runs.run import SETTINGS, TESTS, Outcome, run

LIMIT = 200.0
"""Seconds that transformers may take."""


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Reference]:
    """What transformers generates, by model; in a process of its own, which vLLM never enters."""
    folder = tmp_path_factory.mktemp("models")
    subprocess.run(
        [sys.executable, "-P", "-m", "vllm_runs.reference", str(folder)],
        env={**os.environ, **SETTINGS, "PYTHONPATH": str(TESTS)},
        stdin=subprocess.DEVNULL,
        timeout=LIMIT,
        check=True,
    )
    return read(folder)


@pytest.fixture(scope="session")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Case], Outcome]:
    """`run`, which remembers outcomes by name."""
    outcomes: dict[str, Outcome] = {}

    def remember(name: str, case: Case) -> Outcome:
        if name not in outcomes:
            outcomes[name] = run(case, Path(tmp_path_factory.mktemp(name)))
        return outcomes[name]

    return remember
