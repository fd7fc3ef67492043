"""CUDA's backend with one slot operation broken. All are on one device: no rank asks by name."""

from contextlib import ExitStack

from devices.conformance.breakage import Sound
from devices.conformance.kernel_and_slot_breakages import cuda_breakages

SOUND = Sound("cudasim:BACKEND", "cudasim.nccl:NCCL")
BREAKAGES = tuple(cuda_breakages())
undone = ExitStack()
"""Nothing: what is planted for one device is undone by the trial."""
