"""Lets the unpacked SGLang be imported: its folder, and stand-ins for what is not installed."""

import sys

from vllm_ascend_cpu.stand_ins import Finder

from sglang_cpu.fetch import FOLDER

ABSENT = "IPython", "torchvision", "traitlets"
"""What SGLang imports for notebooks and images."""


def install() -> None:
    """Have SGLang found; once a process."""
    sys.path.insert(0, str(FOLDER))
    sys.meta_path.insert(0, Finder(ABSENT))
