"""The file of faults, and what is printed of it."""

import os
from pathlib import Path

import pytest
from npusim import faults


def test_fault_file_counts_faults_of_all_processes(tmp_path: Path) -> None:
    path = tmp_path / "faults"
    path.write_text("npusim fault: [1] a\nnpusim fault: [22] a\nnpusim fault: [1] b\n")
    assert faults.read(path) == {"a": 2, "b": 1}


def test_fault_summary_lists_most_frequent_first(tmp_path: Path) -> None:
    path = tmp_path / "faults"
    path.write_text("npusim fault: [1] b\n" + "npusim fault: [1] a\n" * 2)
    assert faults.summary(faults.read(path)).splitlines() == [
        "npusim: 3 faults, 2 different",
        "      2 x a",
        "      1 x b",
    ]


def test_fault_summary_is_cut_off_after_limit(tmp_path: Path) -> None:
    path = tmp_path / "faults"
    path.write_text("".join(f"npusim fault: [1] number {k}\n" for k in range(60)))
    lines = faults.summary(faults.read(path)).splitlines()
    assert len(lines) == faults.MAX_LINES + 2
    assert lines[-1] == "  and 10 more"


def test_fault_file_counts_truncated_line(tmp_path: Path) -> None:
    path = tmp_path / "faults"
    path.write_bytes(b"npusim fault: [1] half a \xff")
    assert faults.read(path).total() == 1


@pytest.fixture
def stale_folder(tmp_path: Path) -> Path:
    """A folder that a killed launcher left."""
    folder = tmp_path / f"{faults.PREFIX}left"
    folder.mkdir()
    (folder / faults.LOCK).touch()
    os.utime(folder / faults.LOCK, (0, 0))
    return folder


def test_fault_folder_of_killed_launcher_is_removed(stale_folder: Path) -> None:
    faults.forget_dead(stale_folder.parent)
    assert not stale_folder.exists()


def test_fault_folder_just_created_is_kept(stale_folder: Path) -> None:
    (stale_folder / faults.LOCK).touch()
    faults.forget_dead(stale_folder.parent)
    assert stale_folder.exists()


def test_fault_folder_of_living_launcher_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with faults.fault_file() as path:
        os.utime(path.parent / faults.LOCK, (0, 0))
        faults.forget_dead(tmp_path)
        assert path.exists()
    assert list(tmp_path.iterdir()) == []
