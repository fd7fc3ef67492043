"""Programs that show what others' communicators do, without Equipoise: they still show it."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "examples" / "communicator_programs"
PROGRAMS = sorted(path for path in FOLDER.glob("*.py") if not path.stem.endswith("_groups"))
"""The others register groups for the suite."""
LIBRARIES = ("torchft", "commux")
"""Begin the names of programs that need them; all others are about torch's own gloo."""
MAX_LINES = 20
TIMEOUT = 100.0


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_program_shows_what_its_page_says(program: Path) -> None:
    library = program.stem.partition("_")[0]
    if library in LIBRARIES and find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    assert "SHOWN" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_program_is_short_and_knows_no_equipoise(program: Path) -> None:
    text = program.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    lines = [line for line in text.splitlines() if line.strip() and docstring not in line]
    assert len(lines) <= MAX_LINES
    assert "equipoise" not in text.lower()


def test_page_names_every_program() -> None:
    page = (FOLDER.parents[1] / "docs" / "foreign-communicators.md").read_text()
    assert [path.name for path in PROGRAMS if path.name not in page] == []
