"""What real torch_npu shows of the simulated device. Arguments: the names of what to look at."""

import os
import sys
import threading
from collections.abc import Callable, Mapping

import torch
from devices.simulator.programs.driver import faults, report

DEVICE = "npu:0"
npu = torch.get_device_module("npu")


def fresh() -> list[int]:
    """The bytes of new memory."""
    data: list[int] = torch.empty(64, dtype=torch.uint8, device=DEVICE).cpu().tolist()
    return data


def streams() -> list[int]:
    """Of 33 streams, how many there are, and whose the last one is."""
    handles = [npu.Stream().npu_stream for _ in range(33)]
    return [len(set(handles)), handles.index(handles[32])]


def unrecorded_event() -> list[bool]:
    """torch_npu itself lets it pass: it makes the driver's event at the first record."""
    with faults() as lines:
        event = npu.Event()
        ready = event.query()
        event.wait()
        npu.synchronize()
    return [ready, not lines]


def out_of_memory() -> str:
    """What an allocation beyond the device raises, and whether the next one works."""
    try:
        torch.empty(1 << 40, dtype=torch.uint8, device=DEVICE)
    except torch.OutOfMemoryError as error:
        assert torch.ones(4, device=DEVICE).sum().item() == 4
        return type(error).__name__
    return "nothing"


def external_event() -> list[bool]:
    """Whether what waits has run, before and after the record."""
    gate, waits, signals, mark = npu.ExternalEvent(), npu.Stream(), npu.Stream(), npu.Event()
    gate.wait(waits)
    mark.record(waits)
    signals.synchronize()
    before = mark.query()
    gate.record(signals)
    npu.synchronize()
    return [before, mark.query()]


def captured_stream() -> list[bool]:
    """Whether a stream is being captured: as torch.npu says of it, as `torch.Stream` does."""
    stream, graph = npu.Stream(), npu.NPUGraph()
    with npu.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        answers = [npu.is_current_stream_capturing(), stream.is_capturing()]
        graph.capture_end()
    return answers


def device_of_new_thread() -> int:
    """The one that torch names, and so gives it, in a process that uses another one only."""
    npu.set_device(1)
    devices = list[int]()
    thread = threading.Thread(
        target=lambda: devices.append(torch.accelerator.current_device_index())
    )
    thread.start()
    thread.join()
    npu.set_device(0)
    return devices[0]


def synchronisation_in_a_capture() -> str:
    """What it raises."""
    graph = npu.NPUGraph()
    try:
        with npu.graph(graph):
            npu.synchronize()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def index_out_of_range() -> dict[str, object]:
    """Where it is told: not at the call, but at the next synchronisations, all of them."""
    source = torch.arange(8, device=DEVICE)
    npu.synchronize()
    messages = []
    with faults() as lines:
        source[torch.tensor([99], device=DEVICE)]
        for _ in range(2):
            try:
                npu.synchronize()
            except RuntimeError as error:
                messages.append(str(error))
    return {"raised": messages, "told": len(lines)}


def missing_operator() -> dict[str, str]:
    """What an operator that libopapi lacks raises, and what it tells."""
    message = "nothing"
    with faults() as lines:
        try:
            torch.erfinv(torch.zeros(4, device=DEVICE)).cpu()
        except RuntimeError as error:
            message = str(error)
    return {"raised": message, "told": " ".join(lines)}


LOOKS: Mapping[str, Callable[[], object]] = {
    look.__name__: look
    for look in (
        fresh,
        streams,
        unrecorded_event,
        out_of_memory,
        external_event,
        captured_stream,
        device_of_new_thread,
        synchronisation_in_a_capture,
        index_out_of_range,
        missing_operator,
    )
}

if __name__ == "__main__":
    report(**{name: LOOKS[name]() for name in sys.argv[1:]})
    sys.stdout.flush()
    os._exit(0)  # a stream that has failed is not taken down in order
