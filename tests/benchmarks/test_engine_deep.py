"""The engine at full strength: what is kept of it, and the page that shows it."""

import runpy
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
SUITE = """<testsuites><testsuite>
  <testcase name="a" time="1.5">
    <properties>
      <property name="x" value='{"n": 1}'/>
      <property name="hypothesis-stats-a" value="a: 100 passing examples"/>
    </properties>
  </testcase>
  <testcase name="b" time="2"><failure message="no"/></testcase>
  <testcase name="c" time="0"><skipped/></testcase>
  <testcase name="d" time="0.1"><error message="no"/></testcase>
</testsuite></testsuites>"""


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    return runpy.run_path(str(BENCHMARKS / f"{name}.py"))


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return loaded("engine_deep_page", monkeypatch)


def test_the_page_is_what_the_results_say(page: dict[str, Any]) -> None:
    assert page["PAGE"].read_text() == page["page"]()


def test_what_has_not_been_run_is_owed(
    page: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(page["_load"].__globals__, "RESULTS", tmp_path)
    assert page["page"]().count("OWED") == len(page["SUITES"])


def test_what_was_run_has_passed_whole(page: dict[str, Any]) -> None:
    for name in page["SUITES"]:
        if (found := page["_load"](name)) is not None:
            assert set(found["figures"]["tests"].values()) == {"passed"}, name
            assert found["figures"]["exit_code"] == 0, name


def test_every_suite_has_its_place_on_the_page(
    page: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(page["SUITES"]) == set(loaded("engine_deep", monkeypatch)["SUITES"])


def test_how_each_test_ended_is_kept_with_what_it_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    told = loaded("engine_deep", monkeypatch)["told"](ElementTree.fromstring(SUITE))
    assert told["tests"] == {"a": "passed", "b": "failed", "c": "skipped", "d": "failed"}
    assert told["recorded"] == {"x": {"n": 1}}
    assert told["seconds"] == 4


def test_a_case_stands_by_what_goes_wrong_and_where(page: dict[str, Any]) -> None:
    figures = {
        "tests": {
            "test_x[Planning-killed-boundary]": "passed",
            "test_y[slow-Moving-boundary]": "failed",
            "test_z": "passed",
        },
        "seconds": 1,
        "recorded": {},
        "command": "run",
    }
    found = {"figures": figures, "commit": "c", "machine": {}, "command": []}
    page["_suite"].__globals__["source"] = lambda _: "a machine"
    assert page["_suite"](found) == [
        "1 failed, 2 passed, in 1 s.",
        "",
        "| test | |",
        "|---|---|",
        "| `test_z` | passed |",
        "",
        "| boundary | Planning | Moving |",
        "|---|---|---|",
        "| killed | passed |  |",
        "| slow |  | failed |",
        "",
        "`run`, by a machine",
    ]
