"""Calls a function that the simulator lacks."""

from npusim_tests.programs import driver

driver.report(code=driver.call("rtKernelLaunch"))
