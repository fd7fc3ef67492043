"""The pages on conformance are what the results say."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from conformance.mutants.collection import mutants

from equipoise.hal.conformance import suite

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return runpy.run_path(str(BENCHMARKS / "contract_page.py"))


def test_the_matrix_is_what_the_results_say(module: dict[str, Any]) -> None:
    assert module["PAGE"].read_text() == module["page"]()


def test_the_guide_quotes_a_violation_that_was_found(module: dict[str, Any]) -> None:
    assert module["GUIDE"].read_text() == module["guide"]()


def test_every_mutant_of_the_results_is_rejected_by_its_property(module: dict[str, Any]) -> None:
    rows = module["_load"]("mutants")["figures"]["mutants"]
    assert len(rows) >= 40
    lives = [name for name, row in rows.items() if row["property"] not in row["rejected_by"]]
    assert lives == []


def test_no_backend_of_ours_violates_a_clause(module: dict[str, Any]) -> None:
    columns = module["_load"]("contract")["figures"]
    broken = {
        name: [c for c, status in column["clauses"].items() if status == "violated"]
        for name, column in columns.items()
    }
    assert {name: found for name, found in broken.items() if found} == {}


def test_whoever_else_rejects_a_mutant_is_declared_beside_it(module: dict[str, Any]) -> None:
    declared = {mutant.name: {mutant.property, *mutant.also} for mutant in mutants()}
    rows = module["_load"]("mutants")["figures"]["mutants"]
    assert set(rows) == set(declared)
    undeclared = {
        name: sorted(set(row["rejected_by"]) - declared[name]) for name, row in rows.items()
    }
    assert {name: found for name, found in undeclared.items() if found} == {}


def test_the_pages_name_the_properties_that_there_are(module: dict[str, Any]) -> None:
    listed = [claim["name"] for claim in module["_load"]("mutants")["figures"]["properties"]]
    assert listed == [claim.name for claim in suite.properties()]
