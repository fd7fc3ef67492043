"""`python -m sglang_cpu.fetch`: SGLang's Python, unpacked beside what is installed.

It is not installed: it asks for kernels of GPUs and for versions of its own.
"""

import sys
from pathlib import Path

from vllm_cpu.unpack import mark_unpacked, unpack_wheels

WHEELS = ("sglang==0.5.23",)
FOLDER = Path(sys.prefix, "sglang")


def is_needed(name: str) -> bool:
    """Whether a file of the wheel is unpacked."""
    return not name.endswith(".so")


def fetch(folder: Path) -> None:
    """Unpack, unless it was; raises where pip fails."""
    if unpack_wheels(folder, WHEELS, is_needed):
        mark_unpacked(folder, WHEELS)


if __name__ == "__main__":
    fetch(FOLDER)
