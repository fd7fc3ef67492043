"""The simulator's own comparisons: every operator with torch on the CPU, and ranks that talk."""

import sys

import pytest
from devices.simulator.simulated_program import Outcome, launch

pytestmark = pytest.mark.timeout(400)
LIMIT = 380.0


def selftest(name: str) -> Outcome:
    """Run one of them under the lazy schedule."""
    command = (sys.executable, "-m", f"npusim.selftest.{name}")
    return launch("--schedule", "lazy", "--", *command, limit=LIMIT)


@pytest.mark.deep
def test_simulated_operators_match_torch_cpu_bit_for_bit() -> None:
    outcome = selftest("ops")
    assert outcome.code == 0, outcome.out
    assert ": 0 wrong" in outcome.out


def test_simulated_hccl_passes_right_and_reports_wrong_programs() -> None:
    outcome = selftest("hccl")
    assert outcome.code == 0, outcome.out
    assert outcome.out.count(" ok\n") == len(outcome.out.splitlines())
