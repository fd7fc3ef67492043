"""The kernels are compiled where there is a device, and interpreted where there is none."""

from helpers.harnesses.triton_interpreter import interpret_without_device

interpret_without_device()
