"""Runs pytest over the simulated driver, on its strictest schedule: `python -m devices.launch`.

Builds the driver where it is missing or old. What follows goes to pytest, which runs all of
tests/devices where no path is among it. torch_npu needs a CPU build of torch: where torch is
another, a line says that this environment is skipped, in the form in which tox says so.
"""

import os
import sys
from collections.abc import Sequence

from npusim.errors import Refused
from npusim.wheels import find_torch

COMMAND = ("-m", "npusim", "--schedule", "lazy", "--", sys.executable, "-m", "pytest")

FOLDER = "tests/devices"
LONGEST = f"{FOLDER}/test_suites.py"
"""First, so that with two processes one runs it while the other runs everything else."""


def refusal() -> str | None:
    """Why nothing can be run here."""
    try:
        find_torch()
    except Refused as error:
        return str(error)
    return None


def main(arguments: Sequence[str]) -> None:
    """Run pytest in place of this process, or say why not."""
    if reason := refusal():
        print(f"  devices: SKIP ({reason})")
    else:
        paths = () if any(word.startswith(FOLDER) for word in arguments) else (LONGEST, FOLDER)
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *COMMAND, *paths, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
