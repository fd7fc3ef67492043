"""Programs as Python: what is written is the case that was found."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.hal.conformance.program import Case, Step, make_program
from equipoise.hal.conformance.reproduce import (
    Reproduction,
    python_source,
    remove_programs,
)

TEXTS = st.text(max_size=8)
ARGUMENTS = st.integers() | TEXTS
STEPS = st.builds(
    Step,
    TEXTS,
    st.lists(ARGUMENTS, max_size=3).map(tuple),
    st.integers(-1, 3),
    st.integers(0, 1),
)
CASES = st.builds(
    Case,
    st.builds(
        make_program, st.lists(STEPS, max_size=4), st.integers(1, 8),
        st.dictionaries(TEXTS, ARGUMENTS, max_size=3),
    ),
    st.binary(max_size=8),
)  # fmt: skip


@given(CASES, TEXTS, st.none() | TEXTS)
def test_written_program_is_that_of_the_case(case: Case, what: str, steer: str | None) -> None:
    written = Reproduction(
        property="p", executor="virtual", backend="b", communicator="c", case=case, steer=steer
    )
    names: dict[str, Any] = {"__name__": "read"}
    exec(compile(python_source(written, "about", what), "program.py", "exec"), names)
    assert names["REPRODUCTION"] == written


def test_long_stacks_are_cut_in_file() -> None:
    case = Case(make_program([Step("isend", (1,))]))
    written = Reproduction(property="p", executor="ranks", backend="b", communicator="c", case=case)
    source = python_source(written, "about", "\n".join(f"frame {n}" for n in range(500)))
    assert "# frame 19\n" in source
    assert "frame 20" not in source


def test_only_files_of_earlier_runs_are_removed(tmp_path: Path) -> None:
    case = Case(make_program([Step("isend", (1,))]))
    written = Reproduction(property="p", executor="ranks", backend="b", communicator="c", case=case)
    (tmp_path / "p.py").write_text(python_source(written, "about", "what"))
    (tmp_path / "mine.py").write_text("# REPRODUCTION = Reproduction( is a word here\n")
    (tmp_path / "notes.txt").write_text("REPRODUCTION = Reproduction(\n")
    (tmp_path / "folder.py").mkdir()
    remove_programs(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.py", "mine.py", "notes.txt"]
    remove_programs(tmp_path / "absent")


def test_device_without_communicator_plays_its_program(capsys: pytest.CaptureFixture[str]) -> None:
    """A run of one device by itself names no communicator, and neither do its files."""
    case = Case(make_program([Step("launch", ("compute",))]))
    alone = Reproduction(
        property="launches-run-in-the-order-that-streams-and-events-give",
        executor="device",
        backend="cpu",
        communicator="",
        case=case,
    )
    assert alone.main() == 0
    assert capsys.readouterr().out.startswith("held: launches-run")


def test_interrupted_program_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("equipoise.hal.conformance.runner.open_subject", interrupt)
    case = Case(make_program([Step("launch", ("compute",))]))
    written = Reproduction(
        property="launches-run-in-the-order-that-streams-and-events-give",
        executor="device",
        backend="cpu",
        communicator="",
        case=case,
    )
    assert written.main() == 130
    assert capsys.readouterr().err == "interrupted\n"
