"""What the driver says about memory and copies, right and wrong."""

import ctypes

from devices.simulator.programs import driver
from devices.simulator.programs.driver import (
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    HOST_TO_HOST,
    SIZE,
    call,
    content,
    copy,
    device_memory,
    do,
    faults,
    pinned_memory,
    stream,
)

driver.start()
first, second = device_memory(), device_memory()
host = ctypes.create_string_buffer(2 * SIZE)
short = pinned_memory(bytes(SIZE))
initial = content(first)
assert copy(first, bytes(range(SIZE)), SIZE, HOST_TO_DEVICE) == 0
data = content(first)


def attempts() -> dict[str, int]:
    """The code of each copy that a correct program does not ask for."""
    room, on = ctypes.c_size_t, stream()
    long, before = room(SIZE + 1), ctypes.c_void_p(int(short.value or 0) - 1)
    return {
        "target too short": copy(first, host, SIZE + 512, HOST_TO_DEVICE),
        "source too short": copy(host, first, SIZE + 512, DEVICE_TO_HOST),
        "more than the room": call("aclrtMemcpy", first, room(1), host, room(SIZE), HOST_TO_DEVICE),
        "host as device": copy(host, second, SIZE, DEVICE_TO_DEVICE),
        "device as host": copy(first, second, SIZE, HOST_TO_DEVICE),
        "pinned target too short": copy(short, first, SIZE + 1, DEVICE_TO_HOST),
        "pinned source too short": copy(first, short, SIZE + 1, HOST_TO_DEVICE),
        "pinned on both sides": copy(short, short, SIZE + 1, HOST_TO_HOST),
        "behind the pinned start": copy(before, first, 2, DEVICE_TO_HOST),
        "asynchronous": call("aclrtMemcpyAsync", short, long, first, long, DEVICE_TO_HOST, on),
        "memset": call("aclrtMemset", short, long, 0, long),
        "asynchronous memset": call("aclrtMemsetAsync", short, long, 0, long, on),
        "unknown kind": copy(first, second, SIZE, 17),
    }


codes = {}
with faults() as attempt_faults:
    codes = attempts()

stale = ctypes.c_void_p(second.value)
do("aclrtFree", second)
with faults() as faults_after_free:
    after_free = copy(host, stale, SIZE, DEVICE_TO_HOST)
    twice = call("aclrtFree", stale)

pinned = pinned_memory(b"\1" * SIZE)
address = int(pinned.value or 0)
do("aclrtFreeHost", pinned)
with faults() as pinned_faults:
    pinned_twice = call("aclrtFreeHost", pinned)

driver.report(
    fresh=initial.hex(),
    written=data == bytes(range(SIZE)),
    untouched=content(first) == data,
    wrong=codes,
    told=len(attempt_faults),
    after_free=after_free,
    twice=twice,
    told_after_free=len(faults_after_free),
    pinned_twice=pinned_twice,
    told_about_pinned=len(pinned_faults),
    too_much=call("aclrtMalloc", ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(1 << 40), 0),
)
