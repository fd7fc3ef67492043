"""The file into which every process under the simulator writes what no correct program causes."""

import fcntl
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from npusim.errors import Refused

VARIABLE = "NPUSIM_FAULTS"
MAX_LINES = 50
"""Different faults that are printed in full."""
PREFIX = "npusim-"
LOCK = "lock"
YOUNG = 60.0
"""Seconds: a folder that is younger may be in the making, and is nobody's to remove."""
PROCESS = re.compile(r"^npusim fault: \[\d+\] ")


@contextmanager
def fault_file() -> Iterator[Path]:
    """An empty file for the time of one command.

    Folders that killed launchers have left go first. Raises `Refused` where none can be made.
    """
    forget_dead(Path(gettempdir()))
    try:
        temporary = TemporaryDirectory(prefix=PREFIX)
    except OSError as error:
        raise Refused(f"no folder for the faults: {error}") from error
    with temporary as folder, (Path(folder) / LOCK).open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as long as this process lives
        path = Path(folder) / "faults"
        path.touch()
        yield path


def forget_dead(where: Path) -> None:
    """Remove the folders of launchers that have died without doing so."""
    for lock in where.glob(f"{PREFIX}*/{LOCK}"):
        try:
            if lock.stat().st_uid != os.getuid() or time.time() - lock.stat().st_mtime < YOUNG:
                continue
            with lock.open(encoding="utf-8") as lock_file:
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:  # its launcher lives, or another one was quicker
            continue


def read(path: Path) -> Counter[str]:
    """How often each fault was told, without the numbers of the processes."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return Counter(PROCESS.sub("", line) for line in lines if line)


def summary(faults: Counter[str]) -> str:
    """The faults, most frequent first, for people."""
    lines = [f"npusim: {faults.total()} faults, {len(faults)} different"]
    lines += [f"  {count:5} x {what}" for what, count in faults.most_common(MAX_LINES)]
    if len(faults) > MAX_LINES:
        lines.append(f"  and {len(faults) - MAX_LINES} more")
    return "\n".join(lines)
