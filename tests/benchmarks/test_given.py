"""Recorded statistics as a trial of planners."""

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.balancer import formats
from equipoise.hal.errors import PlacementError

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return runpy.run_path(str(BENCHMARKS / "given.py"))


def recorded(path: Path, windows: int, experts: int = 8, seed: int = 0) -> Path:
    counts = np.random.default_rng(seed).integers(1, 100, (windows, 2, experts))
    formats.write_statistics(path, formats.Statistics(counts.astype(np.int64)))
    return path


def test_files_follow_each_other_and_nothing_is_lost(given: dict[str, Any], tmp_path: Path) -> None:
    paths = [recorded(tmp_path / f"{i}.npy", 20, seed=i) for i in range(2)]
    trial = given["trial_of"](paths)
    whole = np.concatenate([formats.read_statistics(path).counts for path in paths])
    assert len(trial.loads) == given["WINDOWS"]
    assert (sum(trial.loads) == whole.sum(axis=0)).all()
    assert (trial.loads[0] == whole[: len(whole) // given["WINDOWS"] + 1].sum(axis=0)).all()
    assert not any(trial.switched)


def test_batches_are_windows_that_were_recorded(given: dict[str, Any], tmp_path: Path) -> None:
    path = recorded(tmp_path / "a.npy", 40)
    counts = formats.read_statistics(path).counts.tolist()
    trial = given["trial_of"]([path])
    assert all(batch.tolist() in counts for told in trial.told for batch in told)


def test_slots_leave_each_rank_one_more_than_the_experts_need(
    given: dict[str, Any], tmp_path: Path
) -> None:
    trial = given["trial_of"]([recorded(tmp_path / "a.npy", 3, experts=10)])
    assert given["shape_of"](trial, 4, None).slots == 16
    assert given["shape_of"](trial, 4, 12).slots == 12


def test_one_window_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match="one window, and a plan is judged by the next"):
        given["trial_of"]([recorded(tmp_path / "a.npy", 1)])


def test_files_of_other_shapes_are_refused_by_name(given: dict[str, Any], tmp_path: Path) -> None:
    paths = [recorded(tmp_path / "a.npy", 2), recorded(tmp_path / "b.npy", 2, experts=6)]
    with pytest.raises(PlacementError, match=r"b.npy: 2 x 6 layers x experts, and 2 x 8 in .*a"):
        given["trial_of"](paths)


def planner(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "planner.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)


def test_the_table_of_recorded_loads_has_every_planner(tmp_path: Path) -> None:
    path = recorded(tmp_path / "a.npy", 6)
    kept = tmp_path / "out.json"
    done = planner(
        "--quick", "--statistics", str(path), "--ranks", "4", "--slots", "12", "--json", str(kept)
    )
    assert done.returncode == 0, done.stderr
    assert kept.exists()
    heads = done.stdout.splitlines()[2].split()
    assert heads == ["greedy", "snake", "swift-like", "connected", "incremental"]


def test_what_is_no_statistics_ends_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{}")
    done = planner("--statistics", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "broken.json" in done.stderr
