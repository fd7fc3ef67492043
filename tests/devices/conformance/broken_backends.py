"""Broken backends by name, for rank processes: `devices.conformance.broken_backends:NAME`.

Whoever asks for a name has its process broken for good; the driver, which asks too, undoes it.
"""

from contextlib import ExitStack

from devices.conformance.breakage import Sound, patch
from devices.conformance.breakages import BREAKAGES

from equipoise.backends.ascend import BACKEND
from equipoise.hal.accelerator import Backend

SOUND = Sound("equipoise.backends.ascend:BACKEND", "equipoise.backends.ascend:HCCL")
undone = ExitStack()
"""What undoes everything that was planted in this process."""


def __getattr__(name: str) -> Backend:
    for breakage in BREAKAGES:
        if breakage.name == name:
            breakage.plant(lambda owner, attribute, value: patch(undone, owner, attribute, value))
            return BACKEND
    raise AttributeError(name)
