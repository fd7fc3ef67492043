"""The harness by itself, without vLLM: what is ended, what is read, what is refused."""

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL

import pytest
from engines.vllm.runs import process_cleanup as orphans
from engines.vllm.runs.case import Case, Front
from engines.vllm.runs.process_cleanup import Kin
from engines.vllm.runs.run import run
from engines.vllm.runs.run_server import flags
from helpers.paths import SEARCH_PATH
from vllm_cpu import faults
from vllm_cpu.missing_features import PARALLEL, SECOND_RUNNER, STOCK_EPLB, VARIABLE, Hole, filled

TIMEOUT_S = 20.0
SLEEPER = "import time; print(flush=True); time.sleep(100)"
MAPPER = """
import mmap, sys, time
with open(sys.argv[1], "r+b") as segment:
    mapped = mmap.mmap(segment.fileno(), 0)
print(flush=True)
time.sleep(100)
"""


def sleeper(mark: str, program: str = SLEEPER, *words: str) -> subprocess.Popen[bytes]:
    """A process of a run, in a process group of its own; it has come to its `print`.

    Before that its environment may not be in /proc yet, though it has been started.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words],
        env={**os.environ, orphans.VARIABLE: mark, "PYTHONPATH": SEARCH_PATH},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.fixture
def segment() -> Iterator[Path]:
    """A piece of shared memory."""
    path = Path("/dev/shm", f"equipoise-test-{uuid.uuid4().hex}")
    path.write_bytes(bytes(4096))
    yield path
    path.unlink(missing_ok=True)


def test_case_adds_plugin_settings_to_additional_config() -> None:
    engine = {"additional_config": {"vllm_cpu": {"eplb": {}}}, "seed": 7}
    case = Case("m", [], 1, engine)
    assert case.arguments["additional_config"] == {"vllm_cpu": {"eplb": {}}}
    case_with_plugin = replace(case, plugin={"eplb_policy": "greedy"})
    both = {"vllm_cpu": {"eplb": {}}, "equipoise": {"eplb_policy": "greedy"}}
    assert case_with_plugin.arguments == case.arguments | {"additional_config": both}
    assert engine["additional_config"] == {"vllm_cpu": {"eplb": {}}}


def test_server_flags_are_built_from_engine_arguments() -> None:
    engine_arguments = {
        "model": "m",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    expected = ["m", "--enforce-eager", "--no-enable-prefix-caching", "--seed", "0"]
    assert flags(engine_arguments) == expected
    assert flags({"model": "m", "additional_config": {"a": 1}})[1:] == [
        "--additional-config",
        '{"a": 1}',
    ]


def test_every_hole_belongs_to_a_profile() -> None:
    assert sorted(Hole) == sorted([*PARALLEL, *STOCK_EPLB, *SECOND_RUNNER])


def test_unknown_hole_or_fault_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "collectives,colectives")
    with pytest.raises(ValueError, match="colectives"):
        filled()
    monkeypatch.setenv(faults.VARIABLE, "dropped")
    with pytest.raises(ValueError, match="dropped"):
        faults.planted()


def test_process_cleanup_kills_only_processes_of_its_run() -> None:
    mark, other = uuid.uuid4().hex, uuid.uuid4().hex
    with sleeper(mark) as first, sleeper(mark) as second, sleeper(other) as third:
        assert orphans.end_all(Kin(mark)) == sorted([first.pid, second.pid])
        assert (first.wait(TIMEOUT_S), second.wait(TIMEOUT_S)) == (-SIGKILL, -SIGKILL)
        assert third.poll() is None
        orphans.end_all(Kin(other))


def test_process_cleanup_finds_unmarked_process_by_leader() -> None:
    with sleeper("another") as process:
        assert orphans.end_all(Kin(uuid.uuid4().hex)) == []
        assert orphans.end_all(Kin(uuid.uuid4().hex, process.pid)) == [process.pid]
        assert process.wait(TIMEOUT_S) == -SIGKILL


def test_driver_ends_with_its_parent_and_frees_shared_memory(segment: Path) -> None:
    mark = uuid.uuid4().hex
    cleanup = "from engines.vllm.runs import process_cleanup; process_cleanup.end_with_parent()"
    program = f"{cleanup}; {SLEEPER}"
    with sleeper(mark, program) as driver, sleeper(mark, MAPPER, str(segment)) as worker:
        assert driver.stdin is not None
        driver.stdin.close()
        assert driver.wait(TIMEOUT_S) == worker.wait(TIMEOUT_S) == -SIGKILL
    assert not segment.exists()


def test_process_cleanup_keeps_mapped_shared_memory(segment: Path) -> None:
    mark = uuid.uuid4().hex
    with sleeper(mark, MAPPER, str(segment)):
        segments = orphans.segments_of(Kin(mark))
        assert segments == {segment}
        assert orphans.remove_unused(segments) == []
        orphans.end_all(Kin(mark))
    assert orphans.remove_unused(segments) == [segment]
    assert not segment.exists()


@pytest.mark.parametrize("front", ["offline", "server"])
def test_run_over_its_time_limit_is_ended_and_reported(front: Front, tmp_path: Path) -> None:
    # Where vLLM is missing the driver ends by itself, with an exit code.
    outcome = run(Case("no such model", [[1]], 1, front=front), tmp_path, limit=0.0)
    assert outcome.code in (None, 1)
    assert outcome.answers is None
    with pytest.raises(AssertionError, match="exit code"):
        _ = outcome.rounds


def test_run_removes_its_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "passing").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "passing"))
    folder, path_file = tmp_path / "case", tmp_path / "seen.txt"
    folder.mkdir()
    leaving = f"import tempfile as t; open({str(path_file)!r}, 'w').write(t.mkdtemp())"
    (folder / "sitecustomize.py").write_text(leaving, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    run(Case("no such model", [[1]], 1), folder, limit=TIMEOUT_S)
    assert Path(path_file.read_text(encoding="utf-8")).parent.parent == tmp_path / "passing"
    assert list((tmp_path / "passing").iterdir()) == []
