"""Work on four streams, with waits between them; what ran when is in the trace.

With an argument (hexadecimal) the schedule is steered.
"""

import sys

from devices.simulator.programs import driver
from devices.simulator.programs.driver import DEVICE_TO_DEVICE, SIZE, copy_on, do
from npusim.steering import steer

if len(sys.argv) > 1:
    steer(bytes.fromhex(sys.argv[1]))
driver.start()
streams = [driver.stream() for _ in range(4)]
memory = [driver.device_memory() for _ in range(5)]
marks = [driver.event() for _ in range(4)]
for turn in range(5):
    for k, on in enumerate(streams):
        copy_on(on, memory[k + 1], memory[k], SIZE, DEVICE_TO_DEVICE)
        do("aclrtRecordEvent", marks[k], on)
        if turn % 2 == 0:
            do("aclrtStreamWaitEvent", streams[(k + 1) % 4], marks[k])
do("aclrtSynchronizeDevice")
driver.report(done=True)
