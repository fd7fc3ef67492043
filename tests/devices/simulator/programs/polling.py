"""A host that asks, or watches a word, and never waits: both must see an end some day."""

import ctypes
import threading
import time

from devices.simulator.programs import driver
from devices.simulator.programs.driver import (
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    SIZE,
    copy_on,
    device_memory,
    do,
    pinned_memory,
    stream,
)

LIMIT = 20.0
driver.start()
memory, scratch, ones = device_memory(), device_memory(), pinned_memory(b"\1" * SIZE)
busy = stream()


def work() -> None:
    """Something that is launched all the time, so that the device never finds calls missing."""
    copy_on(busy, scratch, scratch, SIZE, DEVICE_TO_DEVICE)


def asking() -> bool:
    """Asks a stream while it launches on another."""
    polled, status, expiry = stream(), ctypes.c_int(1), time.monotonic() + LIMIT
    copy_on(polled, memory, ones, SIZE, HOST_TO_DEVICE)
    while status.value and time.monotonic() < expiry:
        work()
        do("aclrtStreamQuery", polled, ctypes.byref(status))
    return status.value == 0


def watching() -> bool:
    """Looks at a pinned word without a call, while another thread goes on launching."""
    out, over, expiry = pinned_memory(bytes(SIZE)), threading.Event(), time.monotonic() + LIMIT

    def launch() -> None:
        do("aclrtSetDevice", 0)
        while not over.wait(0.005):
            work()

    other = threading.Thread(target=launch)
    other.start()
    watched = stream()
    copy_on(watched, memory, ones, SIZE, HOST_TO_DEVICE)
    copy_on(watched, out, memory, SIZE, DEVICE_TO_HOST)
    while ctypes.string_at(out, SIZE) != b"\1" * SIZE and time.monotonic() < expiry:
        time.sleep(0.001)
    over.set()
    other.join(LIMIT)
    return ctypes.string_at(out, SIZE) == b"\1" * SIZE


driver.report(asking=asking(), watching=watching())
