"""The example of a loop of one's own does what it says."""

import subprocess
import sys

import pytest
from helpers.paths import ROOT

pytestmark = pytest.mark.timeout(900)
EXAMPLE = ROOT / "examples" / "own_loop.py"


def test_own_loop_example_moves_experts_and_keeps_outputs() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *epochs, last = done.stdout.splitlines()
    copies = [int(line.split(", ")[1].split()[0]) for line in epochs]
    assert any("epoch committed" in line for line in epochs)
    assert all("committed" in line or "unchanged" in line for line in epochs)
    assert sum(copies) > 0
    assert float(last.rpartition(" ")[2]) < 1e-5
