"""Named shared memory: what somebody has left, on a machine where others come and go."""

import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")
SEGMENT = re.compile(r"/dev/shm/\S+")
SETTLED = 1.0
"""Seconds that a segment has to be nobody's: whoever makes one maps it a moment later."""
LOOK = 0.05


SEMAPHORE = "sem.mp-"
"""Of Python's multiprocessing, whose resource tracker removes them some time after the processes of
any other test were killed."""


def segments() -> set[Path]:
    """Of this user, now; without semaphores of multiprocessing."""
    paths = set()
    for path in FOLDER.iterdir():
        with suppress(FileNotFoundError):
            if path.stat().st_uid == os.getuid() and not path.name.startswith(SEMAPHORE):
                paths.add(path)
    return paths


def left_since(before: set[Path]) -> set[Path]:
    """Segments that have come since `before`, and that no process maps any more.

    Those of other tests that run meanwhile are mapped.
    """
    until, remaining = time.monotonic() + SETTLED, segments() - before
    while remaining and time.monotonic() < until:
        remaining &= segments() - mapped(Path("/proc").glob("[0-9]*/maps"))
        time.sleep(LOOK)
    return remaining


def mapped(tables: Iterable[Path]) -> set[Path]:
    """Segments in tables of mappings, `/proc/PID/maps`; those of who has gone are passed over."""
    paths: set[Path] = set()
    for table in tables:
        with suppress(OSError):
            paths |= {Path(name) for name in SEGMENT.findall(table.read_text())}
    return paths
