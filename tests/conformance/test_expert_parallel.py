"""Our exchange keeps the clauses of an expert-parallel library, in both forms; no false alarms."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from conformance.mutants.expert_libraries import LoneLibrary, RoundingLibrary
from helpers.fakes.null_progress_listener import NullProgressListener
from helpers.paths import ROOT, SEARCH_PATH
from helpers.records import RecordProperty, add_clauses
from helpers.tiers import DEEP
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equipoise.backends.virtual import BACKEND
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Fabric
from equipoise.hal.conformance import suite
from equipoise.hal.conformance.clauses import EXPERT_PARALLEL
from equipoise.hal.conformance.executors.controlled import ControlledSubject
from equipoise.hal.conformance.executors.processes import ProcessSubject
from equipoise.hal.conformance.profile import Executor, Profile
from equipoise.hal.conformance.property import Property, StatefulPrograms
from equipoise.hal.conformance.runner import (
    RunOptions,
    plan_runs,
    run_properties,
)
from equipoise.hal.conformance.search import (
    PropertyHeld,
    PropertyUnsupported,
    PropertyViolated,
    SearchSettings,
    search,
)
from equipoise.hal.conformance.subject import missing_capability
from equipoise.hal.expert_parallel import (
    ExpertParallelCapabilities,
    ExpertParallelConfig,
    ExpertParallelGroup,
    ExpertParallelLibrary,
)
from equipoise.hal.stream import Stream
from equipoise.pipeline.all_to_all.expert_parallel import (
    FIXED_CAPACITY,
    FixedCapacityGroup,
    FixedCapacityLibrary,
    exchange_format,
)

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


class Shapeless:
    """A group without a base class, and without most methods."""

    def dispatch(self, tokens: Tensor, expert_ids: Tensor) -> None:
        """Two arguments too few."""

    def close(self) -> None:
        """Nothing is held."""


class ThreeMethods:
    """A group without a base class, and without the optional methods."""

    def __init__(self, *arguments: Any) -> None:
        group = FixedCapacityGroup(*arguments)
        self.dispatch, self.combine, self.close = group.dispatch, group.combine, group.close


class Unfinished(ExpertParallelGroup):
    """A subclass that lacks what must be written."""

    def close(self) -> None:
        """Nothing is held."""


class ReturnsPair(FixedCapacityGroup):
    def dispatch(self, *inputs: Any) -> Any:
        received = super().dispatch(*inputs)
        return received.rows, received.experts


class MasksInName(FixedCapacityGroup):
    set_active = ExpertParallelGroup.set_active


@dataclass(frozen=True)
class MalformedLibrary(FixedCapacityLibrary):
    """Opens groups with something amiss."""

    make: Callable[..., Any] = Shapeless

    def open(
        self, config: ExpertParallelConfig, accelerator: Accelerator, fabric: Fabric, purpose: str
    ) -> Any:
        form = exchange_format(config, fabric.control.size)
        return self.make(form, accelerator, fabric.open(purpose), config.deadline)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda *_: Shapeless(), "has no method combine"),
        (lambda *_: Shapeless(), "dispatch(tokens: torch.Tensor, expert_ids: torch.Tensor)"),
        (lambda *_: None, "open returned no group"),
        (lambda _, accelerator, *__: Unfinished(accelerator, 1.0), "combine, dispatch"),  # type: ignore[abstract]
        (ReturnsPair, "dispatch returned a tuple, not ReceivedTokens"),
        (MasksInName, "has no set_active of its own, and declares what it does"),
    ],
)
def test_malformed_group_is_told_once_and_by_the_clause_of_methods(
    make: Callable[..., Any], told: str
) -> None:
    subject = ControlledSubject(BACKEND, MalformedLibrary(make=make))
    plan = plan_runs(PROPERTIES, {Executor.VIRTUAL: subject})
    options = RunOptions(Profile.CI, seed=0, cases=2)
    (finding,) = run_properties(plan, options, NullProgressListener())
    assert isinstance(finding.verdict, PropertyViolated)
    assert finding.verdict.clause == "M17"
    assert told in " ".join(finding.verdict.what.split())


@dataclass(frozen=True)
class ThreeMethodsLibrary(MalformedLibrary):
    """Declares only what needs no further method."""

    make: Callable[..., Any] = ThreeMethods

    @property
    def capabilities(self) -> ExpertParallelCapabilities:
        return ExpertParallelCapabilities(empty_batches=True)


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.name)
def test_group_without_base_class_and_without_finish_is_judged(prop: Property) -> None:
    subject = ControlledSubject(BACKEND, ThreeMethodsLibrary())
    verdict = search(prop, subject, SearchSettings(cases=CASES, max_shrinks=0))
    assert isinstance(verdict, PropertyHeld | PropertyUnsupported), verdict


class Fails(FixedCapacityGroup):
    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        raise RuntimeError("out of memory")


def test_group_that_fails_is_played_on() -> None:
    subject = ControlledSubject(BACKEND, MalformedLibrary(make=Fails))
    plan = plan_runs(PROPERTIES, {Executor.VIRTUAL: subject})[:2]
    findings = tuple(
        run_properties(plan, RunOptions(Profile.CI, seed=0, cases=1), NullProgressListener())
    )
    assert len(findings) == 2
    assert all("out of memory" in getattr(f.verdict, "what", "") for f in findings)
    assert {getattr(f.verdict, "clause", "") for f in findings} == {"M1"}


@dataclass(frozen=True)
class LimitedLibrary(FixedCapacityLibrary):
    """Takes few numbers of experts and of choices."""

    @property
    def capabilities(self) -> ExpertParallelCapabilities:
        limits: dict[str, Any] = {"experts_per_rank": (4, 16), "top_ks": (6, 8)}
        return replace(super().capabilities, **limits)


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.name)
@given(data=st.data())
def test_programs_have_the_numbers_of_experts_that_are_declared(
    prop: Property, data: st.DataObject
) -> None:
    subject = ControlledSubject(BACKEND, LimitedLibrary())
    if missing_capability(prop, subject.traits) is not None:
        return
    assert not isinstance(prop.programs, StatefulPrograms)
    program = data.draw(prop.programs(subject.traits))
    assert program.int_setting("experts_per_rank") in (4, 16)
    assert program.int_setting("top_k") in (6, 8)
    assert program.int_setting("top_k") <= program.size * program.int_setting("experts_per_rank")


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
    assert sum(isinstance(v, PropertyHeld) for v in verdicts.values()) == 11
