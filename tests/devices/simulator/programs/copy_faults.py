"""So many faults, and an exit code."""

import ctypes
import sys

from devices.simulator.programs import driver

driver.start()
host = ctypes.create_string_buffer(driver.SIZE)
for _ in range(int(sys.argv[1])):
    driver.copy(host, host, driver.SIZE, driver.DEVICE_TO_DEVICE)
sys.exit(int(sys.argv[2]))
