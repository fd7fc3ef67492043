"""What is run over the simulated driver is bounded in time, whatever it does."""

import os
import sys
import time

import pytest
from conformance.ascend.everything import TIMED_OUT, Step, perform, run_bounded

WAITS = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {}]); time.sleep(60)"
SLEEPS = "'import os, time; print(os.getpid(), flush=True); time.sleep(60)'"


def running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_command_that_hangs_is_ended_with_all_that_it_started(
    capfd: pytest.CaptureFixture[str],
) -> None:
    command = [sys.executable, "-c", WAITS.format(SLEEPS)]
    assert run_bounded(command, 5.0) == TIMED_OUT
    told = capfd.readouterr().out.split()
    child = int(told[0])
    deadline = time.monotonic() + 10
    while running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(child)
    assert "not done after 5 s" in " ".join(told)


def test_the_first_step_that_fails_is_the_last(capfd: pytest.CaptureFixture[str]) -> None:
    steps = [Step((sys.executable, "-c", f"raise SystemExit({code})")) for code in (0, 3, 5)]
    assert perform(steps) == 3
    assert capfd.readouterr().out.count("exit code") == 2
