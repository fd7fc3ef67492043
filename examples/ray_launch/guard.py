"""Runs a command, and ends it when whoever started this is gone: a program of its own.

    python guard.py LOG GRACE COMMAND ...

By its standard input, a pipe, it hears of that; its standard output tells how the command ended.
"""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from typing import BinaryIO

LOOK = 0.1
"""Seconds from one look at the command to the next."""


def main(log: str, grace: float, command: list[str]) -> None:
    """Until the command has ended, by itself or not; its group is killed with it."""
    try:
        child = _start(log, command)
    except OSError as error:
        print(f"it cannot be started: {error}", flush=True)
        return
    while child.poll() is None:
        if select.select([0], [], [], LOOK)[0]:  # nobody holds the other end any more
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(grace)
            break
    with suppress(ProcessLookupError):  # it itself, or what it has left behind
        os.killpg(child.pid, signal.SIGKILL)
    print(child.wait(60.0), flush=True)


def _start(log: str, command: list[str]) -> subprocess.Popen[bytes]:
    """In a group of its own, so that all of it can be ended; without a log it writes to ours."""
    out: BinaryIO = open(log, "ab", 0) if log else sys.stderr.buffer  # noqa: SIM115
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
    )


if __name__ == "__main__":
    # Ray kills the children of a worker that exits, and not theirs: a guard that were one of them
    # would leave its server behind. So it becomes nobody's child.
    if os.fork():
        os._exit(0)
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3:])
