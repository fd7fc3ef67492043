"""The examples of balanced serving, and Python lines of README, index and tutorial, work."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

pytestmark = pytest.mark.timeout(900)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def play(*command: str, folder: Path = ROOT) -> list[str]:
    """Lines of standard output."""
    environment = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")
    }
    completed = subprocess.run(
        [sys.executable, *command],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout.splitlines()


def test_own_loop_example_moves_experts_and_keeps_outputs() -> None:
    *reports, last = play(str(ROOT / "examples" / "own_loop.py"))
    copies = [int(line.split(", ")[1].split()[0]) for line in reports]
    outcomes = {line.split(": ")[1].split(",")[0] for line in reports}
    assert "committed" in outcomes
    assert outcomes <= {"committed", "unchanged"}
    assert sum(copies) > 0
    assert float(last.rpartition(" ")[2]) < 1e-5


def test_nano_example_shows_plan_vote_commit_and_better_balance() -> None:
    lines = play(str(ROOT / "examples" / "nano.py"))
    for stage in ("load", "plan", "vote", "staged", "commit"):
        assert any(line[6:].startswith(stage) for line in lines), stage
    assert any("committed" in line for line in lines)
    before, after = map(float, re.findall(r"\d\.\d+", lines[-1]))
    assert 0 <= after < before


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/tutorial.md"])
def test_python_lines_of_page_work_when_pasted(page: str, tmp_path: Path) -> None:
    blocks = PYTHON.findall((ROOT / page).read_text("utf-8"))
    assert blocks
    script = tmp_path / "pasted.py"
    script.write_text("".join(blocks))
    assert play(str(script), folder=tmp_path)
