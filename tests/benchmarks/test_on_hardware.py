"""The report of a machine that has the hardware holds every step, whatever became of it."""

import json
import runpy
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "on_hardware.py"


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def test_a_step_that_fails_is_recorded_with_what_it_printed(
    script: dict[str, Any], tmp_path: Path
) -> None:
    step = script["Step"]("broken", python("import sys; print('so far'); sys.exit(3)"))
    outcome = script["perform"](step, tmp_path, 60.0)
    assert (outcome.name, outcome.exit_code) == ("broken", 3)
    assert (tmp_path / "broken.txt").read_text() == "so far\n"


def test_a_step_that_hangs_is_ended(script: dict[str, Any], tmp_path: Path) -> None:
    step = script["Step"]("endless", python("import time; time.sleep(600)"))
    assert script["perform"](step, tmp_path, 0.5).exit_code == -1


def test_a_tool_that_is_missing_is_said_to_be(script: dict[str, Any]) -> None:
    assert script["machine"]([("no-such-tool-anywhere",)]) == {
        "no-such-tool-anywhere": "FileNotFoundError"
    }


def test_the_archive_names_nobody_and_holds_the_report(
    script: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "report.tar.gz"
    code = script["main"](["--backend", "virtual", "--only", "doctor", "--out", str(out)])
    assert code == 0
    with tarfile.open(out) as archive:
        names = {entry.name: (entry.uname, entry.uid) for entry in archive}
        file = archive.extractfile("equipoise-report/report.json")
        assert file is not None
        report = json.load(file)
    assert {f"equipoise-report/{name}" for name in ("doctor.txt", "report.json")} < names.keys()
    assert set(names.values()) == {("", 0)}
    assert [step["name"] for step in report["steps"]] == ["doctor"]
    assert report["versions"]["torch"]


def test_every_part_of_the_report_is_run_for_a_backend(
    script: dict[str, Any], tmp_path: Path
) -> None:
    names = [step.name for step in script["steps"]("ascend", 4, tmp_path)]
    assert names[:5] == ["doctor", "conformance-1", "conformance-4", "run-2", "run-4"]


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (1, ["doctor", "conformance-1", "run-1"]),
        (2, ["doctor", "conformance-1", "conformance-2", "run-2"]),
    ],
)
def test_a_small_machine_runs_nothing_twice(
    script: dict[str, Any], tmp_path: Path, ranks: int, names: list[str]
) -> None:
    assert [step.name for step in script["steps"]("ascend", ranks, tmp_path)] == names


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--only", "doktor"), "--only: unknown doktor; known: doctor, conformance-1"),
        (("--out", "/no/such/folder/x.tar.gz"), "cannot be written"),
        (("--out", "."), "cannot be written"),
        (("--limit", "-1"), "--limit is a positive number of seconds, not -1"),
        (("--limit", "nan"), "not nan"),
        (("--ranks", "0"), "--ranks is 1 to 64, not 0"),
        (("--backend", "abacus"), "abacus"),
        (("--backend", "helpers.fakes.crowded:BACKEND", "--ranks", "3"), "has 2 device(s) here"),
    ],
)
def test_what_cannot_be_done_is_said_before_hours_are_spent(
    script: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parent.parent / "tests"))
    with pytest.raises(SystemExit) as ended:
        script["main"](["--backend", "virtual", *arguments])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def asleep(process: Path) -> bool:
    try:
        return (process / "cmdline").read_bytes() == b"sleep\0617.3\0"
    except OSError:
        return False


def test_the_processes_of_a_step_that_is_ended_end_too(
    script: dict[str, Any], tmp_path: Path
) -> None:
    child = "import subprocess; subprocess.run(['sleep', '617.3'])"
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {child}"
    script["perform"].__globals__["GRACE"] = 0.2
    assert script["perform"](script["Step"]("deaf", python(deaf)), tmp_path, 2.0).exit_code == -1
    assert not [entry for entry in Path("/proc").glob("[0-9]*") if asleep(entry)]
