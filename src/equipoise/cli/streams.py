"""Standard output and standard error that are closed, full, or no longer read."""

import os
import sys


def open_missing() -> None:
    """Give the program somewhere to write where it was started with a closed stream."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def divert_broken() -> bool:
    """Point every stream that cannot be flushed at the null device.

    What it still holds would otherwise fail again, with a traceback, when the interpreter ends.
    Returns whether standard output was one of them.
    """
    broken = False
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            broken = broken or stream is sys.stdout
            _divert(stream.fileno())
    return broken


def tell(line: str) -> None:
    """One line on standard error, if anybody can read it."""
    try:
        print(f"equipoise: {line}", file=sys.stderr, flush=True)
    except OSError:
        divert_broken()


def _divert(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, descriptor)
    finally:
        os.close(null)
