"""The reference, computed once; and every mode of vLLM, run once however many tests ask."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from engines.vllm.runs.case import Case
from engines.vllm.runs.reference_tokens import Reference, read_references
from engines.vllm.runs.run import SETTINGS, Outcome, run
from helpers.paths import SEARCH_PATH

LIMIT = 900.0
"""Seconds that transformers may take."""


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Reference]:
    """What transformers generates, by model; in a process of its own, which vLLM never enters."""
    folder = tmp_path_factory.mktemp("models")
    subprocess.run(
        [sys.executable, "-P", "-m", "engines.vllm.runs.reference", str(folder)],
        env={**os.environ, **SETTINGS, "PYTHONPATH": SEARCH_PATH},
        stdin=subprocess.DEVNULL,
        timeout=LIMIT,
        check=True,
    )
    return read_references(folder)


@pytest.fixture(scope="session")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Case], Outcome]:
    """`run`, which remembers outcomes by name."""
    outcomes: dict[str, Outcome] = {}

    def remember(name: str, case: Case) -> Outcome:
        if name not in outcomes:
            outcomes[name] = run(case, Path(tmp_path_factory.mktemp(name)))
        return outcomes[name]

    return remember
