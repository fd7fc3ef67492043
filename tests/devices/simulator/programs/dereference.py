"""Reads a byte by its address: dies where the host must not."""

import ctypes
import sys

from devices.simulator.programs import driver

driver.start()
memory = {"device memory": driver.device_memory(), "pinned memory": driver.pinned_memory(b"\1")}
assert ctypes.string_at(memory[sys.argv[1]], 1) == b"\1"
