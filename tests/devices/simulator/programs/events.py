"""What streams wait for: events, external events, values."""

import ctypes

from devices.simulator.programs import driver
from devices.simulator.programs.driver import (
    EXTERNAL,
    HOST_TO_DEVICE,
    SIZE,
    call,
    content,
    copy_on,
    device_memory,
    do,
    event,
    faults,
    pinned_memory,
    stream,
)

PENDING_FOR = 100
"""Milliseconds after which what has not come does not come."""
driver.start()
ones, twos = pinned_memory(b"\1" * SIZE), pinned_memory(b"\2" * SIZE)


def synchronised(on: driver.Pointer) -> int:
    """The code of a bounded synchronisation."""
    return call("aclrtSynchronizeStreamWithTimeout", on, PENDING_FOR)


def unrecorded_wait() -> tuple[int, int]:
    """Its code, and how many faults it is."""
    with faults() as lines:
        code = call("aclrtStreamWaitEvent", stream(), event())
    return code, len(lines)


def keeps_its_recording() -> str:
    """A wait is for the recording before it, whatever is recorded later."""
    first, second, memory, mark = stream(), stream(), device_memory(), event()
    copy_on(first, memory, ones, SIZE, HOST_TO_DEVICE)
    do("aclrtRecordEvent", mark, first)
    do("aclrtStreamWaitEvent", second, mark)
    gate = event(EXTERNAL)
    do("aclrtStreamWaitEvent", first, gate)
    do("aclrtRecordEvent", mark, first)
    do("aclrtSynchronizeStream", second)
    data = content(memory).hex()
    do("aclrtRecordEvent", gate, second)
    do("aclrtSynchronizeStream", first)
    return data


def one_record_releases_one_wait() -> list[int]:
    """Codes of both streams after one recording, and after two."""
    first, second, signals, gate = stream(), stream(), stream(), event(EXTERNAL)
    do("aclrtStreamWaitEvent", first, gate)
    do("aclrtStreamWaitEvent", second, gate)
    do("aclrtRecordEvent", gate, signals)
    once = [synchronised(first), synchronised(second)]
    do("aclrtRecordEvent", gate, signals)
    return [*once, synchronised(first), synchronised(second)]


def value_wait() -> list[int]:
    """Codes before and after the value is written."""
    waiting, writing, word = stream(), stream(), device_memory()
    assert driver.copy(word, bytes(8), 8, HOST_TO_DEVICE) == 0
    do("aclrtValueWait", word, ctypes.c_uint64(7), 1, waiting)
    before = synchronised(waiting)
    do("aclrtValueWrite", word, ctypes.c_uint64(7), 0, writing)
    return [before, synchronised(waiting)]


def waiting_shows_order() -> str:
    """What a stream reads that waits for the stream that writes, or does not."""
    bytes_read = []
    for waits in (True, False):
        writer, reader, memory, mark = stream(), stream(), device_memory(), event()
        out = pinned_memory(bytes(SIZE))
        copy_on(writer, memory, twos, SIZE, HOST_TO_DEVICE)
        do("aclrtRecordEvent", mark, writer)
        if waits:
            do("aclrtStreamWaitEvent", reader, mark)
        copy_on(reader, out, memory, SIZE, driver.DEVICE_TO_HOST)
        do("aclrtSynchronizeStream", reader)
        bytes_read.append(ctypes.string_at(out, SIZE)[:1].hex())
        do("aclrtSynchronizeStream", writer)
    return " ".join(bytes_read)


driver.report(
    unrecorded=unrecorded_wait(),
    keeps=keeps_its_recording(),
    one_each=one_record_releases_one_wait(),
    value=value_wait(),
    order=waiting_shows_order(),
)
