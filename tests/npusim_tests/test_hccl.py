"""Simulated communication: the self-test of `npusim.selftest.hccl` under each schedule."""

import subprocess
import sys

import pytest
from npusim_tests.running import TESTS

pytestmark = [pytest.mark.npusim, pytest.mark.timeout(300)]
LIMIT = 280.0
"""Seconds."""


def play(schedule: str, kind: str) -> str:
    """What the self-test printed; it must have found nothing wrong, and told no fault."""
    done = subprocess.run(
        [sys.executable, "-m", "npusim", "--schedule", schedule, "--"]
        + [sys.executable, "-m", "npusim.selftest.hccl", "--kind", kind],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("schedule", ["eager", "delay:1", "lazy", "explore:1"])
def test_right_communication_gives_the_right_bits_on_one_to_four_ranks(schedule: str) -> None:
    assert play(schedule, "right").count(" ok") == 5


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_wrong_communication_is_told_and_trouble_leaves_the_others_alive(schedule: str) -> None:
    assert play(schedule, "wrong").count(" ok") == 7
