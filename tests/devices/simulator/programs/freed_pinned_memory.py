"""A copy on a stream, whose page-locked source is given back before it runs."""

from devices.simulator.programs import driver
from devices.simulator.programs.driver import (
    HOST_TO_DEVICE,
    SIZE,
    call,
    copy_on,
    device_memory,
    do,
    faults,
    pinned_memory,
    stream,
)

driver.start()
source, target, on = pinned_memory(b"\1" * SIZE), device_memory(), stream()
with faults() as lines:
    copy_on(on, target, source, SIZE, HOST_TO_DEVICE)
    do("aclrtFreeHost", source)
    another = pinned_memory(b"\2" * SIZE)
    synchronised = call("aclrtSynchronizeStream", on)
driver.report(synchronised=synchronised, told=len(lines), target=driver.content(target).hex())
