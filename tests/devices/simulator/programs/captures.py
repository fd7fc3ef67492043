"""What a capture forbids, and what becomes of its events and graphs when it has ended."""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

from devices.simulator.programs import driver
from devices.simulator.programs.driver import (
    DEVICE_TO_DEVICE,
    HOST_TO_DEVICE,
    SIZE,
    Pointer,
    call,
    content,
    copy,
    copy_on,
    device_memory,
    do,
    event,
    faults,
    pinned_memory,
    stream,
)

MODES = {"global": 0, "thread_local": 1, "relaxed": 2}
LIMIT = 20.0
Result = TypeVar("Result")
driver.start()
size = ctypes.c_size_t(SIZE)
memory, pageable = device_memory(), ctypes.create_string_buffer(SIZE)


def begin(on: Pointer, mode: str = "global") -> None:
    """Start a capture."""
    do("aclmdlRICaptureBegin", on, MODES[mode])


def end(on: Pointer) -> tuple[int, Pointer]:
    """End a capture: the code, and the graph."""
    graph = Pointer()
    return call("aclmdlRICaptureEnd", on, ctypes.byref(graph)), graph


def captured(work: Callable[[Pointer], object]) -> Pointer:
    """A graph of what `work` does on a stream."""
    on = stream()
    begin(on)
    work(on)
    code, graph = end(on)
    assert code == 0, driver.recent_error()
    return graph


def in_thread(work: Callable[[], Result]) -> Result:
    """What it finds in another thread of the same device."""
    results: list[Result] = []

    def run() -> None:
        do("aclrtSetDevice", 0)
        results.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LIMIT)
    return results[0]


def code_and_faults(work: Callable[[], int]) -> tuple[int, int]:
    """The code of a call, and how many faults it was."""
    with faults() as lines:
        code = work()
    return code, len(lines)


def event_of_an_ended_capture() -> tuple[int, int]:
    """Waited for by another stream."""
    mark = event()
    captured(lambda on: do("aclrtRecordEvent", mark, on))
    return code_and_faults(lambda: call("aclrtStreamWaitEvent", stream(), mark))


def destroyed_graph() -> list[tuple[int, int]]:
    """Run, and destroyed again."""
    graph = captured(lambda on: None)
    do("aclmdlRIDestroy", graph)
    return [
        code_and_faults(lambda: call("aclmdlRIExecuteAsync", graph, stream())),
        code_and_faults(lambda: call("aclmdlRIDestroy", graph)),
    ]


def graph_in_the_making() -> tuple[int, int]:
    """Destroyed while it is captured; the capture ends well all the same."""
    on, status, graph = stream(), ctypes.c_int(), Pointer()
    begin(on)
    do("aclmdlRICaptureGetInfo", on, ctypes.byref(status), ctypes.byref(graph))
    outcome = code_and_faults(lambda: call("aclmdlRIDestroy", graph))
    assert end(on)[0] == 0
    return outcome


def unsafe() -> dict[str, int]:
    """The code of each unsafe call, here and now."""
    codes = {
        "memset": call("aclrtMemset", memory, size, 0, size),
        "copy": copy(memory, pageable, SIZE, HOST_TO_DEVICE),
        "pageable": _async_copy(other, pageable),
        "pinned": _async_copy(other, pinned),
        "default stream": _async_copy(None, pinned),
    }
    do("aclrtSynchronizeStream", other)
    return codes


def _async_copy(on: Pointer | None, source: object) -> int:
    return call("aclrtMemcpyAsync", memory, size, source, size, HOST_TO_DEVICE, on)


def unsafe_calls(mode: str) -> dict[str, dict[str, int]]:
    """Who may do what while a stream is captured in this mode."""
    codes: dict[str, dict[str, int]] = {}
    on = stream()
    begin(on, mode)
    codes["own thread"] = unsafe()
    codes["other thread"] = in_thread(unsafe)
    relaxed = ctypes.c_int(MODES["relaxed"])
    do("aclmdlRICaptureThreadExchangeMode", ctypes.byref(relaxed))
    codes["exchanged"] = unsafe()
    do("aclmdlRICaptureThreadExchangeMode", ctypes.byref(relaxed))
    codes["in the capture"] = {
        "pageable": _async_copy(on, pageable),
        "query": call("aclrtStreamQuery", on, ctypes.byref(ctypes.c_int())),
        "device": call("aclrtSynchronizeDevice"),
    }
    assert end(on)[0] == 0
    return codes


def end_elsewhere(on: Pointer) -> int:
    """End a capture in a thread that did not begin it."""
    return in_thread(lambda: end(on)[0])


def wrong_ends() -> dict[str, int]:
    """Codes of captures that do not end as they should."""
    codes = {"default stream": call("aclmdlRICaptureBegin", None, 0)}
    for mode in MODES:
        on = stream()
        begin(on, mode)
        codes[f"thread, {mode}"] = end_elsewhere(on)
    first, second, mark = stream(), stream(), event()
    begin(first)
    do("aclrtRecordEvent", mark, first)
    do("aclrtStreamWaitEvent", second, mark)
    codes["default stream joins"] = call("aclrtStreamWaitEvent", None, mark)
    codes["joined stream"] = end(second)[0]
    copy_on(second, memory, memory, SIZE, DEVICE_TO_DEVICE)
    codes["unjoined"] = end(first)[0]
    return codes


def callbacks() -> dict[str, object]:
    """Without a subscription; and which thread runs a captured one that another stream replays."""
    on, thread_ids, over = stream(), [], threading.Event()
    function = ctypes.CFUNCTYPE(None, Pointer)(lambda _: thread_ids.append(threading.get_ident()))
    launch = ("aclrtLaunchCallback", function, None, 1)
    codes: dict[str, object] = {"unsubscribed": call(*launch, on)}

    def serve() -> None:
        while not over.is_set():
            call("aclrtProcessReport", 10)

    thread = threading.Thread(target=serve)
    thread.start()
    do("aclrtSubscribeReport", ctypes.c_uint64(thread.ident or 0), on)
    codes["twice"] = call("aclrtSubscribeReport", ctypes.c_uint64(thread.ident or 0), on)
    begin(on)
    do(*launch, on)
    replayed = stream()
    do("aclmdlRIExecuteAsync", end(on)[1], replayed)
    codes["replayed"] = call("aclrtSynchronizeStreamWithTimeout", replayed, int(LIMIT * 1000))
    over.set()
    thread.join(LIMIT)
    return codes | {"by the captured stream's thread": thread_ids == [thread.ident]}


other, pinned = stream(), pinned_memory(bytes(SIZE))
driver.report(
    ended=event_of_an_ended_capture(),
    destroyed=destroyed_graph(),
    making=graph_in_the_making(),
    unsafe={mode: unsafe_calls(mode) for mode in MODES},
    ends=wrong_ends(),
    callbacks=callbacks(),
    unchanged=len(content(memory)) == SIZE,
)
