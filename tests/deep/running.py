"""Runs a command with a time limit, and ends it with all its processes."""

import itertools
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "EQUIPOISE_DEEP_STEP"
"""Variable by which the processes of a step are found, in whatever session they are."""
TIMED_OUT = 124
"""Exit code of a step that was ended because its time was up, as `timeout` has it."""
GRACE = 2.0
"""Seconds for stacks to be printed, and for processes of a step to end after it."""
ENDING = 20.0
"""Seconds within which killed processes must have ended."""
NUMBERS = itertools.count()


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: exit code, or minus the signal; TIMED_OUT where its time was up.
        seconds: wall time.
        cpu_seconds: of the command and of its descendants that were waited for.
    """

    code: int
    seconds: float
    cpu_seconds: float


def run_bounded(
    command: Sequence[str], limit: float, environment: Mapping[str, str], folder: Path
) -> Ended:
    """Run a command in `folder` for at most `limit` seconds.

    A command that takes longer is aborted, which prints the stacks of Python processes that have
    PYTHONFAULTHANDLER, and then killed. No process of it is left when this returns or raises.
    """
    mark = f"{os.getpid()}.{next(NUMBERS)}"
    began, used = time.monotonic(), _cpu_seconds()
    # A session of its own: an interrupt reaches this process first, which ends all others.
    with subprocess.Popen(
        command, cwd=folder, env={**environment, MARK: mark}, start_new_session=True
    ) as process:
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            print(f"deep: not done after {limit:.0f} s, ended", file=sys.stderr, flush=True)
            _signal_all(mark, process.pid, signal.SIGABRT)
            time.sleep(GRACE)
            code = TIMED_OUT
        finally:
            _kill_all(mark, process.pid)
    return Ended(code, time.monotonic() - began, _cpu_seconds() - used)


def processes_of(mark: str, session: int) -> list[int]:
    """Living processes with that mark in their environment, or of that session."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            state, _, _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            marked = f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or belongs to another user
            continue
        if state not in "ZX" and (marked or int(of) == session):
            found.append(int(entry.name))
    return found


def _kill_all(mark: str, session: int) -> None:
    """Kill what is left, after a moment in which it may end by itself."""
    until = time.monotonic() + GRACE
    while processes_of(mark, session) and time.monotonic() < until:
        time.sleep(0.05)
    left = processes_of(mark, session)
    if left:
        print(f"deep: {len(left)} processes were left, killed", file=sys.stderr, flush=True)
    until = time.monotonic() + ENDING
    while left and time.monotonic() < until:
        _signal_all(mark, session, signal.SIGKILL)
        time.sleep(0.05)
        left = processes_of(mark, session)


def _signal_all(mark: str, session: int, number: int) -> None:
    for process in processes_of(mark, session):
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
