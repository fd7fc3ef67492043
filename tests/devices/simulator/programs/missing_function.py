"""Calls a function that the simulator lacks."""

from devices.simulator.programs import driver

driver.report(code=driver.call("rtKernelLaunch"))
