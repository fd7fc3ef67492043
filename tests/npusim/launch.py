"""Runs a command over the simulated driver, and tells what went wrong in there."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from npusim import faults, process
from npusim.build import ensure

FAULTY = 70
"""Exit code when any process told a fault."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
REPEATABLE = {"TASK_QUEUE_ENABLE": "0", "PYTHONHASHSEED": "0"}
"""For explore: no thread of torch_npu's own hands tasks over, and sets iterate alike."""


@dataclass(frozen=True)
class Settings:
    """How the simulated device is: its schedule, and what differs from the driver's defaults."""

    schedule: str
    devices: int | None = None
    memory: int | None = None
    """MiB of each device."""
    trace: bool = False


def launch(command: Sequence[str], settings: Settings) -> tuple[int, bool]:
    """Build, run `command` and print the faults: its exit code, and whether there was a fault.

    Raises `Refused` and `BuildFailed`.
    """
    libraries = ensure()
    with faults.fault_file() as path:
        code = process.run(command, environment(os.environ, libraries, settings, path))
        told = faults.read(path)
    if told:
        print(faults.summary(told), file=sys.stderr)
    return code, bool(told)


def environment(
    inherited: Mapping[str, str], libraries: Path, settings: Settings, fault_path: Path
) -> dict[str, str]:
    """What the command and all its children see.

    The libraries are found by LD_LIBRARY_PATH, as those of an installed CANN are.
    """
    out = dict(inherited)
    for name, value in _defaults(settings.schedule).items():
        out.setdefault(name, value)
    known = [p for p in inherited.get("LD_LIBRARY_PATH", "").split(os.pathsep) if p]
    others = [p for p in known if p != str(libraries)]
    out["LD_LIBRARY_PATH"] = os.pathsep.join([str(libraries), *others])
    out["NPUSIM_SCHEDULE"] = settings.schedule
    out[faults.VARIABLE] = str(fault_path)
    if settings.devices is not None:
        out["NPUSIM_DEVICES"] = str(settings.devices)
    if settings.memory is not None:
        out["NPUSIM_MEMORY"] = str(settings.memory)
    if settings.trace:
        out["NPUSIM_TRACE"] = "1"
    return out


def _defaults(schedule: str) -> dict[str, str]:
    return ONE_THREAD | (REPEATABLE if schedule.startswith("explore") else {})
