"""A task that reads device memory which was freed meanwhile reads poison, or nothing."""

from devices.simulator.programs import driver
from devices.simulator.programs.driver import (
    DEVICE_TO_DEVICE,
    HOST_TO_DEVICE,
    SIZE,
    call,
    copy,
    copy_on,
    device_memory,
    do,
    faults,
)

driver.start()
source, target, stream = device_memory(), device_memory(), driver.stream()
assert copy(source, b"\1" * SIZE, SIZE, HOST_TO_DEVICE) == 0
with faults() as lines:
    copy_on(stream, target, source, SIZE, DEVICE_TO_DEVICE)
    do("aclrtFree", source)
    synchronised = call("aclrtSynchronizeStream", stream)
    again = call("aclrtSynchronizeStream", stream)
driver.report(
    synchronised=synchronised, again=again, told=len(lines), target=driver.content(target).hex()
)
