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
    installation = ensure()
    with faults.fault_file() as path:
        code = process.run(command, environment(os.environ, installation, settings, path))
        try:
            fault_counts = faults.read(path)
        except OSError as error:  # nobody knows any more whether there were any
            print(f"npusim: the file of faults is lost: {error.strerror}", file=sys.stderr)
            return code, True
    if fault_counts:
        print(faults.summary(fault_counts), file=sys.stderr)
    return code, bool(fault_counts)


def environment(
    inherited: Mapping[str, str], installation: Path, settings: Settings, fault_path: Path
) -> dict[str, str]:
    """What the command and all its children see.

    Three variables are those that set_env.sh of an installed CANN sets.
    """
    out = dict(inherited)
    for name, value in _defaults(settings.schedule).items():
        out.setdefault(name, value)
    out["LD_LIBRARY_PATH"] = _first(installation / "lib64", inherited.get("LD_LIBRARY_PATH", ""))
    out["ASCEND_HOME_PATH"] = str(installation)
    out["ASCEND_OPP_PATH"] = str(installation / "opp")
    # Programs that speak of an NPU find torch_npu loaded, whatever the tests around them ask for.
    out.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
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


def _first(folder: Path, others: str) -> str:
    """A search path that begins with `folder`, which stands in it once."""
    other_paths = [path for path in others.split(os.pathsep) if path not in ("", str(folder))]
    return os.pathsep.join([str(folder), *other_paths])
