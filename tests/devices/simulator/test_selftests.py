"""The simulator's own comparisons: every operator with torch on the CPU, and ranks that talk."""

import sys

import pytest
from devices.simulator.running import Outcome, launch

pytestmark = pytest.mark.timeout(400)
LIMIT = 380.0


def selftest(name: str) -> Outcome:
    """Run one of them under the lazy schedule."""
    command = (sys.executable, "-m", f"npusim.selftest.{name}")
    return launch("--schedule", "lazy", "--", *command, limit=LIMIT)


@pytest.mark.deep
def test_every_operator_gives_the_bits_of_torch_on_the_cpu() -> None:
    outcome = selftest("ops")
    assert outcome.code == 0, outcome.out
    assert ": 0 wrong" in outcome.out


def test_right_programs_on_ranks_end_well_and_wrong_ones_are_told() -> None:
    outcome = selftest("hccl")
    assert outcome.code == 0, outcome.out
    assert outcome.out.count(" ok\n") == len(outcome.out.splitlines())
