"""Describes the machine that figures were measured on."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe_machine() -> dict[str, str]:
    """Processor, cores, memory, operating system and versions, in words.

    A torch that does not import is reported as `does not import`: `equipoise doctor` says why.
    """
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{pages * size / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": _torch_version(),
        "numpy": _numpy_version(),
    }


def _numpy_version() -> str:
    """Not imported: the conformance suite by itself works without it."""
    try:
        return version("numpy")
    except PackageNotFoundError:
        return "is not installed"


def _torch_version() -> str:
    try:
        from torch import __version__
    except (ImportError, OSError):
        return "does not import"
    return __version__


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if sys.platform == "linux" and info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
