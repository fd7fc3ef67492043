"""How many devices there are, and how large they are."""

import ctypes

from devices.simulator.programs import driver

driver.start()
count, free, total = ctypes.c_uint32(), ctypes.c_size_t(), ctypes.c_size_t()
driver.do("aclrtGetDeviceCount", ctypes.byref(count))
driver.do("aclrtGetMemInfo", 0, ctypes.byref(free), ctypes.byref(total))
driver.report(devices=count.value, total=total.value)
