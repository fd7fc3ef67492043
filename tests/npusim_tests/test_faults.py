"""The file of faults, and what is printed of it."""

from pathlib import Path

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
