"""The suite rejects a CUDA backend that is broken in its own parts, on the simulated device."""

import subprocess
import sys

import pytest
from cudasim.breakages import BREAKAGES
from devices.conformance.breakage import Breakage

pytestmark = pytest.mark.deep
LIMIT = 90.0
"""Seconds for one."""


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.name)
def test_cuda_mutant_is_rejected_by_its_property(breakage: Breakage) -> None:
    command = [sys.executable, "-m", "cudasim.trial", breakage.name]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert completed.returncode == 0, f"{breakage.broken}\n{completed.stdout}{completed.stderr}"
