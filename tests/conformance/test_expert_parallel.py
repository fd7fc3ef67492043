"""Our exchange keeps the clauses of an expert-parallel library, in both forms; no false alarms."""

import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from conformance.mutants.expert_libraries import LoneLibrary, RoundingLibrary
from helpers.paths import ROOT, SEARCH_PATH
from helpers.records import RecordProperty, add_clauses
from helpers.tiers import DEEP

from equipoise.backends.virtual import BACKEND
from equipoise.hal.conformance import suite
from equipoise.hal.conformance.clauses import EXPERT_PARALLEL
from equipoise.hal.conformance.executors.controlled import ControlledSubject
from equipoise.hal.conformance.executors.processes import ProcessSubject
from equipoise.hal.conformance.property import Property
from equipoise.hal.conformance.search import (
    PropertyHeld,
    PropertyUnsupported,
    PropertyViolated,
    SearchSettings,
    search,
)
from equipoise.hal.expert_parallel import ExpertParallelLibrary
from equipoise.pipeline.all_to_all.expert_parallel import FIXED_CAPACITY

LIMIT = 3_000.0 if DEEP else 300.0
pytestmark = pytest.mark.timeout(LIMIT + 100)
SEEDS, CASES = (range(20), 100) if DEEP else (range(2), 25)
PROPERTIES = suite.family(EXPERT_PARALLEL)
COMMANDS = {
    "equipoise.pipeline.all_to_all.expert_parallel:FIXED_CAPACITY": "4",
    "equipoise.pipeline.all_to_all.expert_parallel:VARIABLE_SIZE": "4",
    "conformance.mutants.expert_libraries:LONE": "1",
}
"""Libraries, by number of ranks; the last one in captured graphs."""


@pytest.mark.parametrize(("library", "ranks"), COMMANDS.items(), ids=COMMANDS)
def test_exchange_keeps_clauses_of_expert_parallel_library(
    library: str, ranks: str, tmp_path: Path, record_property: RecordProperty
) -> None:
    verdicts = tmp_path / "verdicts.json"
    suite_command = (sys.executable, "-m", "equipoise", "conformance", "--quiet")
    subject = ("--backend", "cpu", "--ranks", ranks, "--expert-parallel", library)
    command = (*suite_command, *subject, *(("--profile", "deep") if DEEP else ("--cases", "8")))
    completed = subprocess.run(
        [*command, "--json", str(verdicts)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env={**os.environ, "PYTHONPATH": SEARCH_PATH},
    )
    assert completed.returncode == 0, f"{completed.stdout}\n{completed.stderr}"
    assert "contract is kept: " in completed.stdout.splitlines()[-1]
    name = library.partition(":")[2].lower()
    add_clauses(record_property, f"cpu, gloo, {name}", command, verdicts)


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.name)
@pytest.mark.parametrize("library", [FIXED_CAPACITY, LoneLibrary()], ids=lambda each: each.name)
def test_property_holds_on_healthy_virtual_library(
    prop: Property, library: ExpertParallelLibrary
) -> None:
    subject = ControlledSubject(BACKEND, library)
    verdicts = [
        search(prop, subject, SearchSettings(cases=CASES, seed=seed, max_shrinks=0))
        for seed in SEEDS
    ]
    assert [v for v in verdicts if isinstance(v, PropertyViolated)] == []


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.name)
def test_property_is_played_on_some_healthy_library(prop: Property) -> None:
    verdicts = [
        search(prop, ControlledSubject(BACKEND, library), SearchSettings(cases=1))
        for library in (FIXED_CAPACITY, LoneLibrary())
    ]
    assert not all(isinstance(verdict, PropertyUnsupported) for verdict in verdicts)


@pytest.mark.parametrize("name", ["combine-is-the-dense-sum", "uneven-loads-arrive-whole"])
def test_declared_error_of_rows_is_allowed_and_no_larger_one(name: str) -> None:
    prop, settings = suite.find(name), SearchSettings(cases=60, max_shrinks=0)
    within = ControlledSubject(BACKEND, RoundingLibrary())
    assert isinstance(search(prop, within, settings), PropertyHeld)
    beyond = ControlledSubject(BACKEND, RoundingLibrary(relative_error=0.001))
    assert isinstance(search(prop, beyond, settings), PropertyViolated)


def test_library_on_the_page_keeps_what_it_declares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "expert-parallel-conformance.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "all_gather_library.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    library = "all_gather_library:LIBRARY"
    with closing(ProcessSubject("cpu", "gloo", 2, library=library)) as subject:
        verdicts = {
            prop.name: search(prop, subject, SearchSettings(cases=4)) for prop in PROPERTIES
        }
    assert {name: v for name, v in verdicts.items() if isinstance(v, PropertyViolated)} == {}
    assert sum(isinstance(v, PropertyHeld) for v in verdicts.values()) == 10
