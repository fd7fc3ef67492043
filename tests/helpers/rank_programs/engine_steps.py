"""Steps of mixed sizes between two stages, as an engine hands them over."""

import time
from functools import partial
from typing import Any

import torch
from helpers.rank_programs.channels import MOST, place
from helpers.rank_programs.operations import meet
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.hal.communicator import Fabric
from equipoise.hal.stream import Event
from equipoise.pipeline.channel.edge import EdgeContext
from equipoise.pipeline.channel.endpoints import (
    ChannelSpec,
    Receiver,
    Sender,
    open_receiver,
    open_sender,
)
from equipoise.pipeline.channel.schema import RowField, SchemaTemplate, SliceMode

WIDTH = 512
"""Elements of a row: reading the largest step takes a while."""
NAMES = "hidden", "residual"


def run(
    fabric: Fabric, rows: list[int], in_flight: int, parts: int, backend: str = "cpu"
) -> dict[str, Any]:
    """The first `parts` ranks hand every step to the others.

    A step begins when the one `in_flight` steps before it has ended on all ranks, as a scheduler
    waits for its answer, and when nothing refers to its buffers. Statistics are those behind the
    first `in_flight` steps.
    """
    with place(fabric, parts=parts, backend=backend) as at:
        sending = fabric.control.rank < parts
        spec = _spec(fabric.control.rank % parts, parts, in_flight)
        end = open_sender(spec, at) if sending else open_receiver(spec, at)
        received = torch.zeros(len(rows), 2, MOST, WIDTH).to(at.accelerator.device)
        at.accelerator.synchronize(WATCHDOG)
        ends: list[Event] = []
        before = end.statistics
        for number, count in enumerate(rows):
            if number >= in_flight:
                _await_step(ends[number - in_flight], end)
                meet(fabric, f"after step {number - in_flight}")
            if number == in_flight:
                before = end.statistics
            if isinstance(end, Sender):
                _send(at, end, number, count)
            else:
                _read(at, end, count, received[number])
            ends.append(at.accelerator.event())
            at.stream.record(ends[-1])
        counted = vars(end.statistics.since(before))
        end.drain()
        at.accelerator.synchronize(WATCHDOG)
        meet(fabric, "the end")
        steps = [] if sending else list(received.cpu())
        return {
            "right": [_is_step(each, number, rows[number]) for number, each in enumerate(steps)],
            "finite": all(bool(tensors.isfinite().all()) for tensors in steps),
            **counted,
        }


def _spec(source: int, parts: int, in_flight: int) -> ChannelSpec:
    mode = SliceMode.SLICED if parts > 1 else SliceMode.WHOLE
    fields = tuple(RowField(name, (WIDTH,), torch.float32, mode) for name in NAMES)
    return ChannelSpec(
        name=f"{source} to {source + parts}",
        source=source,
        destination=source + parts,
        template=SchemaTemplate(fields, MOST),
        depth=in_flight,
    )


def _content(number: int, rows: int) -> Tensor:
    """float32 [2, rows, WIDTH]: both tensors of a step; no two steps are alike."""
    return torch.arange(2.0 * rows * WIDTH).view(2, rows, WIDTH) + 1000 * number


def _await_step(done: Event, end: Sender | Receiver) -> None:
    """Wait for the end of a step, and for its buffer: torch_npu's launching thread may have
    references to tensors for a moment after the device has read them."""
    done.synchronize(WATCHDOG)
    expiry = time.monotonic() + WATCHDOG
    while not end.has_free_buffer():
        assert time.monotonic() < expiry, "the buffer of a step that has ended does not become free"
        time.sleep(0.001)


def _send(at: EdgeContext, sender: Sender, number: int, rows: int) -> None:
    """Send the rows of a padded step, which is written over right behind it."""
    padded = torch.full((2, MOST, WIDTH), float("nan"))
    padded[:, :rows] = _content(number, rows)
    with at.stream.current():
        outputs = padded.to(at.accelerator.device)
    sender.send({name: outputs[index][:rows] for index, name in enumerate(NAMES)})
    at.stream.launch(partial(outputs.fill_, -1.0))


def _read(at: EdgeContext, receiver: Receiver, rows: int, into: Tensor) -> None:
    """Read a padded step, and let go of it before the stream has."""
    receiver.expect(rows)
    tensors, handle = receiver.take(MOST)
    handle.wait()
    for name, destination in zip(NAMES, into, strict=True):
        at.stream.launch(partial(destination.copy_, tensors[name]))


def _is_step(tensors: Tensor, number: int, rows: int) -> bool:
    return torch.equal(tensors[:, :rows], _content(number, rows))
