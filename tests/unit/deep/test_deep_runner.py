"""`tox -e deep`: bounded steps, reports, results that are merged part by part, exit codes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from deep import __main__ as deep
from deep import matrix_page, page, results, running
from deep.parts import PARTS, REPORT, Part, Report, Step
from helpers.processes.process_state import alive
from helpers.records import add_row
from helpers.watchdog import WATCHDOG

JUNIT = """<testsuites><testsuite>
  <testcase classname="tests.a" name="a" time="1.5">
    <properties>
      <property name="table: soak" value='{"path": "in_place", "steps": 7}'/>
      <property name="table: fault matrix" value='{"fault": "killed", "passed in": ["Moving"]}'/>
      <property name="hypothesis-stats-a" value="a: 100 passing examples"/>
    </properties>
  </testcase>
  <testcase classname="tests.a" name="b" time="2">
    <properties><property name="table: soak" value='{"path": "staged"}'/></properties>
    <failure message="no"/>
  </testcase>
  <testcase classname="tests.a" name="c" time="0"><skipped/></testcase>
  <testcase classname="tests.a" name="d" time="0.1"><error message="no"/></testcase>
  <testcase classname="tests.a" name="e" time="0.1">
    <properties>
      <property name="table: fault matrix" value='{"fault": "killed", "passed in": ["Planning"]}'/>
    </properties>
  </testcase>
</testsuite></testsuites>"""
HANGS = """
import os, subprocess, sys, time
waits = [sys.executable, "-c", "import time; time.sleep(60)"]
child = subprocess.Popen(waits, start_new_session=True)
with open(sys.argv[1], "w") as told:
    print(os.getpid(), child.pid, file=told)
time.sleep(60)
"""


def part(name: str, *steps: Step, lacks: str | None = None) -> Part:
    return Part(name=name, proves="it", takes="a second", steps=lambda: steps, lacks=lambda: lacks)


def step(code: str, name: str = "step", limit: float = 20.0, **more: object) -> Step:
    command = (sys.executable, "-c", code, REPORT)
    return Step(name=name, command=command, limit=limit, **more)  # type: ignore[arg-type]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, results.Results]]:
    """Runs parts with results in a folder of their own; the exit code, and what was kept."""
    monkeypatch.setattr(deep, "save", lambda rows: results.save(rows, tmp_path / "results.json"))
    monkeypatch.setattr(deep, "write_pages", lambda rows: None)
    monkeypatch.setattr(running, "GRACE", 0.1)
    monkeypatch.setattr(deep, "versions", lambda step, environment: "Python")

    def call(
        parts: Sequence[Part], is_named: bool = False, trial: bool = False
    ) -> tuple[int, results.Results]:
        stored_results = results.load(tmp_path / "results.json")
        code = deep.Runner(deep.Request(parts, is_named, trial, ()), stored_results).run()
        return code, results.load(tmp_path / "results.json")

    return call


def test_junit_report_yields_counts_failing_tests_and_tables(tmp_path: Path) -> None:
    file = tmp_path / "report.xml"
    file.write_text(JUNIT)
    assert results.from_junit(file) == {
        "passed": 2,
        "failed": 2,
        "skipped": 1,
        "failing": ["tests.a::b", "tests.a::d"],
        "tables": {
            "soak": [{"path": "in_place", "steps": 7}],
            "fault matrix": [{"fault": "killed", "passed in": ["Moving", "Planning"]}],
        },
    }


def test_add_row_records_json_property(tmp_path: Path) -> None:
    properties: list[tuple[str, object]] = []
    add_row(lambda name, value: properties.append((name, value)), "soak", {"path": "in_place"})
    assert properties == [("table: soak", '{"path": "in_place"}')]


def test_deep_results_merge_replaces_only_one_step() -> None:
    before = {"a": [{"step": "x", "commit": "1"}, {"step": "y", "commit": "1"}], "b": []}
    after = results.merged(before, "a", {"step": "x", "commit": "2"})
    assert after == {"a": [{"step": "x", "commit": "2"}, {"step": "y", "commit": "1"}], "b": []}
    assert results.restricted(after, "a", ["y"])["a"] == [{"step": "y", "commit": "1"}]
    assert results.merged({}, "a", {"step": "x"}) == {"a": [{"step": "x"}]}


def test_deep_results_round_trip(tmp_path: Path) -> None:
    stored_results = results.load()
    assert set(stored_results) <= {each.name for each in PARTS}
    results.save(stored_results, tmp_path / "again.json")
    assert results.load(tmp_path / "again.json") == stored_results
    results.save({"a": [], "b": [{"step": "x"}]}, tmp_path / "few.json")
    assert results.load(tmp_path / "few.json") == {"a": [], "b": [{"step": "x"}]}


@pytest.mark.slow
def test_deep_hanging_step_is_ended_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "GRACE", 0.3)
    pid_file = tmp_path / "processes"
    popen_wait = subprocess.Popen.wait

    def wait_once_started(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        """The limit begins when both processes run, however long that takes."""
        expiry = time.monotonic() + WATCHDOG
        while not (pid_file.exists() and pid_file.read_text().endswith("\n")):
            assert time.monotonic() < expiry
            time.sleep(0.01)
        return popen_wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_once_started)
    command = [sys.executable, "-c", HANGS, str(pid_file)]
    result = running.run_bounded(command, 0.1, dict(os.environ), tmp_path)
    assert result.code == running.TIMED_OUT
    processes = [int(word) for word in pid_file.read_text().split()]
    assert len(processes) == 2
    assert not any(map(alive, processes))


def test_deep_step_reports_exit_code_and_cpu_seconds(tmp_path: Path) -> None:
    spin = "import time\nwhile time.process_time() < 0.2: pass\nraise SystemExit(3)"
    result = running.run_bounded([sys.executable, "-c", spin], 60.0, dict(os.environ), tmp_path)
    assert result.code == 3
    assert result.cpu_seconds >= 0.2


def test_deep_step_process_left_behind_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "GRACE", 0.1)
    pid_file = tmp_path / "processes"
    code = HANGS.rpartition("time.sleep")[0]
    command = [sys.executable, "-c", code, str(pid_file)]
    assert running.run_bounded(command, 60.0, dict(os.environ), tmp_path).code == 0
    assert not alive(int(pid_file.read_text().split()[1]))


def test_deep_failing_part_exits_1_after_later_parts(
    run: Callable[..., tuple[int, results.Results]],
) -> None:
    bad = part("unit", step("raise SystemExit(4)"))
    slow = part("matrix", step("import time; time.sleep(60)", limit=0.5))
    good = part("types", step("pass"))
    code, stored_results = run([bad, slow, good])
    assert code == 1
    outcomes = {name: [row["outcome"] for row in rows] for name, rows in stored_results.items()}
    assert outcomes == {"unit": ["exit code 4"], "matrix": ["timed out"], "types": ["passed"]}
    assert run([good])[0] == 0


def test_deep_part_run_alone_replaces_only_its_own_rows(
    run: Callable[..., tuple[int, results.Results]],
) -> None:
    both = [part("unit", step("pass", "x"), step("pass", "y")), part("types", step("pass"))]
    first = run(both)[1]
    second = run([part("unit", step("raise SystemExit(1)", "y"))])[1]
    assert [row["step"] for row in second["unit"]] == ["y"]
    assert second["unit"][0]["outcome"] == "exit code 1"
    assert second["types"] == first["types"]


def test_deep_step_without_report_fails(run: Callable[..., tuple[int, results.Results]]) -> None:
    code, stored_results = run([part("unit", step("pass", report=Report.JUNIT))])
    assert (code, stored_results["unit"][0]["outcome"]) == (1, "no report")


def test_deep_results_keep_tables_of_report(
    run: Callable[..., tuple[int, results.Results]],
) -> None:
    write = 'import sys; open(sys.argv[1], "w").write(\'{"mutants": [{"mutant": "m"}]}\')'
    code, stored_results = run([part("matrix", step(write, report=Report.TABLES))])
    assert code == 0
    assert stored_results["matrix"][0]["tables"] == {"mutants": [{"mutant": "m"}]}


def test_deep_failed_preparation_ends_part_without_row(
    run: Callable[..., tuple[int, results.Results]],
) -> None:
    code, stored_results = run(
        [part("types", step("raise SystemExit(1)", prepares=True), step("pass"))]
    )
    assert (code, stored_results) == (1, {})


@pytest.mark.parametrize("is_named", [False, True])
def test_deep_unrunnable_part_is_skipped_unless_named(
    run: Callable[..., tuple[int, results.Results]],
    is_named: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, stored_results = run([part("engines", step("pass"), lacks="no engines")], is_named)
    assert (code, stored_results) == (int(is_named), {})
    assert "  engines: SKIP (no engines)\n" in capsys.readouterr().out


def test_deep_trial_saves_no_results(run: Callable[..., tuple[int, results.Results]]) -> None:
    assert run([part("unit", step("pass"))], trial=True) == (0, {})


def test_command_line_names_parts_and_passes_options_to_pytest() -> None:
    request = deep.read_request(["--trial", "engines", "unit", "--", "-k", "planner"])
    assert request is not None
    assert [each.name for each in request.parts] == ["unit", "engines"]
    assert (request.named, request.trial, request.options) == (True, True, ["-k", "planner"])
    assert not request.kept
    everything = deep.read_request([])
    assert everything is not None
    assert (list(everything.parts), everything.named, everything.kept) == ([*PARTS], False, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nights"], "no part nights; parts are unit, "),
        (["--lst"], "unrecognized arguments: --lst"),
        (["--trail", "unit"], "unrecognized arguments: --trail"),
        (["--list", "--trial"], "not allowed with argument --list"),
        (["--list", "unit"], "--list and --pages stand alone"),
        (["--pages", "x"], "--list and --pages stand alone"),
        (["--trial"], "name the parts to try"),
        (["--", "-k", "planner"], "name the parts to try, or to give options to"),
        (["types", "--", "-k", "planner"], "pytest does not run types"),
        (["unit", "-k", "planner"], "unrecognized arguments: -k"),
    ],
)
def test_command_line_that_means_nothing_runs_no_part(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        deep.main(words)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_deep_steps_have_unique_names_and_bounds() -> None:
    for each in PARTS:
        steps = each.steps()
        assert len({one.name for one in steps}) == len(steps) > 0
        for one in steps:
            assert 0 < one.limit <= 24 * 3600
            assert (REPORT in one.command) == (one.report is not Report.NONE)
            assert str(Path.home()) not in one.shown


def test_deep_pages_show_rows_and_missing_steps() -> None:
    row = {
        "step": "soak",
        "command": "pytest soak",
        "commit": "abc1234+",
        "date": "2026-01-02",
        "outcome": "timed out",
        "machine": "a machine",
        "passed": 1,
        "tables": {"soak": [{"path": "in_place", "steps": 7}], "fresh": [{"n": ["a", "b"]}]},
        "failing": ["tests.a::b"],
    }
    text = page.text({"processes": [row]})
    assert "| processes | soak | **timed out** | 1 |  |  |  |  | abc1234+ | 2026-01-02 |" in text
    assert "| path | steps |\n|---|---|\n| in_place | 7 |\n" in text
    assert "## Fresh\n\n| n |\n|---|\n| a, b |\n" in text
    assert "| unit | | OWED |" in text
    assert "failed: `tests.a::b`" in text
    assert "## Backends\n\nOWED\n" in matrix_page.text({"processes": [row]})
