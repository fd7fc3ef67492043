"""The page of what was seen over the simulated driver says what the results say."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from devices.conformance.breakages import BREAKAGES
from npusim.selftest import races

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
RUNS = 20


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return runpy.run_path(str(BENCHMARKS / "simulated_page.py"))


def test_the_page_is_what_the_results_say(module: dict[str, Any]) -> None:
    assert module["PAGE"].read_text() == module["page"]()


def test_what_has_not_been_run_is_owed(
    module: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(module["_load"].__globals__, "RESULTS", tmp_path)
    assert module["page"]().count("OWED") == 4


def test_no_clause_is_violated_on_any_schedule(module: dict[str, Any]) -> None:
    columns = module["_load"]("suites")["figures"]
    assert {name: column["exit_code"] for name, column in columns.items()} == {
        "eager": 0,
        "delay": 0,
        "lazy": 0,
        "explore": 0,
    }


def test_every_broken_backend_was_caught_every_time(module: dict[str, Any]) -> None:
    rows = module["_load"]("broken")["figures"]
    caught = {row["name"]: (row["caught"], row["runs"]) for row in rows["broken"]}
    assert caught == {breakage.name: (RUNS, RUNS) for breakage in BREAKAGES}
    assert [row["name"] for row in rows["healthy"] if row["caught"]] == []


def test_the_race_table_is_as_it_should_be(module: dict[str, Any]) -> None:
    table = module["_load"]("races")["figures"]["correct"]
    assert races.violations(table) == []
    assert set(table) == set(races.SINGLE)


def test_the_main_job_changed_no_bit(module: dict[str, Any]) -> None:
    rows = module["_load"]("jobs")["figures"]
    assert {ranks: row["outputs_identical"] for ranks, row in rows.items()} == {
        "2": True,
        "4": True,
    }
    assert all(row["slots_moved"] > 0 for row in rows.values())
