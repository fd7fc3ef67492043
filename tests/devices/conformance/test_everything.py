"""What is run over the simulated driver ends with the first failure, and says what it skips."""

import os
import sys
import time
from collections.abc import Iterable

import pytest
from devices.conformance import everything
from devices.conformance.everything import Step
from npusim.errors import Refused

WAITS = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {}]); time.sleep(60)"
SLEEPS = "'import os, time; print(os.getpid(), flush=True); time.sleep(60)'"


def python(program: str) -> Step:
    return Step((sys.executable, "-c", program))


def test_the_first_step_that_fails_is_the_last(capfd: pytest.CaptureFixture[str]) -> None:
    code = everything.perform([python("print(1)"), python("exit(5)"), python("print('never')")])
    out = capfd.readouterr().out
    assert code == 5
    assert "exit code 0" in out
    assert "exit code 5" in out
    assert out.count("$ python -c") == 2


def test_with_another_torch_it_is_skipped_in_a_line_that_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the form in which tox says that it skips an environment: `.ci/run` looks for that."""

    def refuse() -> None:
        raise Refused("torch 2.13.0 is built for CUDA: torch_npu needs a CPU build")

    monkeypatch.setattr(everything, "find_torch", refuse)
    assert everything.main([]) == 0
    assert capsys.readouterr().out.startswith("  npusim: SKIP (torch 2.13.0 is built for CUDA")


def test_what_follows_goes_to_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everything, "find_torch", lambda: None)
    seen: list[Step] = []

    def note(steps: Iterable[Step], longest: float) -> int:
        assert longest == everything.LONGEST_DEEP
        seen.extend(steps)
        return 0

    monkeypatch.setattr(everything, "perform", note)
    assert everything.main(["--deep", "-k", "lock"]) == 0
    assert seen[-1].whole[-2:] == ("-k", "lock")
    assert seen[-1].whole[1:5] == ("-m", "npusim", "--schedule", "lazy")


def running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_step_that_hangs_is_ended_with_all_that_it_started(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = everything.perform([python(WAITS.format(SLEEPS)), python("print('never')")], 5.0)
    told = capfd.readouterr().out
    [child] = [int(line) for line in told.splitlines() if line.isdigit()]
    deadline = time.monotonic() + 10
    while running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(child)
    assert code == everything.TIMED_OUT
    assert "not done after 5 s" in told
    assert "exit code 124" in told
