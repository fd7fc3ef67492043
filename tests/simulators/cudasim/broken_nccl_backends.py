"""Broken backends over NCCL by name, for rank processes: `cudasim.broken_nccl_backends:NAME`.

As `devices.conformance.broken_backends`, over the stand-ins for CUDA and NCCL.
"""

from contextlib import ExitStack

from devices.conformance.breakage import Sound, patch

import cudasim
from cudasim.nccl_breakages import BREAKAGES
from equipoise.hal.accelerator import Backend

SOUND = Sound("cudasim:BACKEND", "cudasim.nccl:NCCL")
undone = ExitStack()
"""What undoes everything that was planted in this process."""


def __getattr__(name: str) -> Backend:
    for breakage in BREAKAGES:
        if breakage.name == name:
            breakage.plant(lambda owner, attribute, value: patch(undone, owner, attribute, value))
            return cudasim.BACKEND
    raise AttributeError(name)
