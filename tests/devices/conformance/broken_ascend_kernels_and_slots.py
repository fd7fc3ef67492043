"""Ascend's backend with one operation broken. All are on one device: no rank asks by name."""

from contextlib import ExitStack

from devices.conformance.breakage import Sound
from devices.conformance.kernel_and_slot_breakages import ascend_breakages

SOUND = Sound("equipoise.backends.ascend:BACKEND", "equipoise.backends.ascend:HCCL")
BREAKAGES = tuple(ascend_breakages())
undone = ExitStack()
"""Nothing: what is planted for one device is undone by the trial."""
