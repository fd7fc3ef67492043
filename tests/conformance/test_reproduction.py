"""The Python file of a violation shows it again by itself, and passes on the healthy backend."""

import os
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.paths import ROOT

from equipoise.hal.conformance import suite
from equipoise.hal.conformance.profile import Executor
from equipoise.hal.conformance.result import Finding, SuiteResult
from equipoise.hal.conformance.runner import SubjectPlace, open_subject
from equipoise.hal.conformance.search import PropertyViolated, SearchSettings, search
from equipoise.report.conformance import program_source

WATCHDOG = 120.0
FAKES = "helpers.fakes.broken_by_executor"


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A backend that is broken, its healthy twin, and the property that rejects it."""

    executor: Executor
    backend: str
    communicator: str
    property: str
    clause: str

    def healthy(self, source: str) -> str:
        """The source of a file, with the healthy backends in place of the broken ones."""
        names = {f"{FAKES}:VIRTUAL": "virtual", f"{FAKES}:CPU": "cpu", f"{FAKES}:GLOO": "gloo"}
        for name, healthy in names.items():
            source = source.replace(f'="{name}"', f'="{healthy}"')
        return source


BROKEN = (
    Broken(
        executor=Executor.VIRTUAL,
        backend=f"{FAKES}:VIRTUAL",
        communicator="virtual",
        property="a-commit-is-visible-after-its-event",
        clause="V1",
    ),
    Broken(
        executor=Executor.DEVICE,
        backend=f"{FAKES}:CPU",
        communicator="gloo",
        property="an-event-says-when-its-point-is-reached",
        clause="O7",
    ),
    Broken(
        executor=Executor.RANKS,
        backend="cpu",
        communicator=f"{FAKES}:GLOO",
        property="long-messages-arrive-whole",
        clause="S1",
    ),
)


def source_of_violation(broken: Broken) -> str:
    place = SubjectPlace(broken.backend, broken.communicator, 2)
    prop = suite.find(broken.property)
    with closing(open_subject(broken.executor, place, None)) as subject:
        verdict = search(prop, subject, SearchSettings(cases=50, seed=1, max_shrinks=50))
    assert isinstance(verdict, PropertyViolated)
    assert verdict.clause == broken.clause
    finding = Finding(prop.name, prop.family, prop.clauses, broken.executor.value, verdict, 1.0)
    result = SuiteResult(
        backend=broken.backend,
        communicator=broken.communicator,
        ranks=2,
        profile="ci",
        seed=1,
        findings=(finding,),
        seconds=1.0,
    )
    return program_source(result, finding)


def run_file(path: Path, source: str) -> subprocess.CompletedProcess[str]:
    path.write_text(source)
    return subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=WATCHDOG, check=False
    )


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.executor.value)
def test_file_of_violation_shows_it_again(
    broken: Broken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(ROOT / "tests"), str(ROOT / "tests" / "simulators"), os.environ.get("PYTHONPATH")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    source = source_of_violation(broken)
    again = run_file(tmp_path / "again.py", source)
    assert again.returncode == 1, again.stderr
    assert again.stdout.startswith(f"{broken.clause}: ")
    healthy = run_file(tmp_path / "healthy.py", broken.healthy(source))
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
    assert healthy.stdout.startswith(f"held: {broken.property}, played ")


def test_file_of_violation_refuses_missing_backend_with_one_line(tmp_path: Path) -> None:
    broken = BROKEN[1]
    source = source_of_violation(broken).replace(broken.backend, "no.such.module:BACKEND")
    answer = run_file(tmp_path / "missing.py", source)
    assert answer.returncode == 2
    [line] = answer.stderr.splitlines()
    assert line.startswith("cannot be played: backend 'no.such.module:BACKEND' does not import")


def test_schedule_is_part_of_file() -> None:
    """Without it the virtual violation does not show: its program alone is eager, and right."""
    source = source_of_violation(BROKEN[0])
    assert "schedule=bytes.fromhex(" in source
