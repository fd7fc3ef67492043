"""The file of faults, and what is printed of it."""

import os
from pathlib import Path

import pytest
from npusim import faults


def test_faults_of_several_processes_are_counted_together(tmp_path: Path) -> None:
    path = tmp_path / "faults"
    path.write_text("npusim fault: [1] a\nnpusim fault: [22] a\nnpusim fault: [1] b\n")
    assert faults.read(path) == {"a": 2, "b": 1}


def test_the_most_frequent_fault_stands_first(tmp_path: Path) -> None:
    path = tmp_path / "faults"
    path.write_text("npusim fault: [1] b\n" + "npusim fault: [1] a\n" * 2)
    assert faults.summary(faults.read(path)).splitlines() == [
        "npusim: 3 faults, 2 different",
        "      2 x a",
        "      1 x b",
    ]


def test_many_different_faults_do_not_fill_the_screen(tmp_path: Path) -> None:
    path = tmp_path / "faults"
    path.write_text("".join(f"npusim fault: [1] number {k}\n" for k in range(60)))
    lines = faults.summary(faults.read(path)).splitlines()
    assert len(lines) == faults.SHOWN + 2
    assert lines[-1] == "  and 10 more"


def test_a_line_cut_short_by_a_dying_process_is_still_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "faults"
    path.write_bytes(b"npusim fault: [1] half a \xff")
    assert faults.read(path).total() == 1


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A folder that a killed launcher left."""
    folder = tmp_path / f"{faults.PREFIX}left"
    folder.mkdir()
    (folder / faults.LOCK).touch()
    os.utime(folder / faults.LOCK, (0, 0))
    return folder


def test_what_a_killed_launcher_left_is_removed_at_the_next_start(left: Path) -> None:
    faults.forget_dead(left.parent)
    assert not left.exists()


def test_a_folder_in_the_making_stays(left: Path) -> None:
    (left / faults.LOCK).touch()
    faults.forget_dead(left.parent)
    assert left.exists()


def test_the_folder_of_a_launcher_that_lives_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with faults.fault_file() as path:
        os.utime(path.parent / faults.LOCK, (0, 0))
        faults.forget_dead(tmp_path)
        assert path.exists()
    assert list(tmp_path.iterdir()) == []
