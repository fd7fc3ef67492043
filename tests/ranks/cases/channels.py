"""Channels between ranks of the CPU backend."""

from typing import Any

import torch
from ranks.cases.patterns import SOON
from torch import Tensor

from equipoise.backends.cpu import BACKEND
from equipoise.hal.communicator import Fabric
from equipoise.hal.stream import Role
from equipoise.pipeline.channel import ChannelPlan, Place, open_receiver, open_sender
from equipoise.pipeline.template import RowField, Template

TEMPLATE = Template(
    (RowField("hidden", (6,), torch.bfloat16), RowField("residual", (6,), torch.float32)), most=32
)


def step(number: int, rows: int) -> dict[str, Tensor]:
    """What travels in one step: no two steps are alike."""
    base = torch.arange(rows * 6, dtype=torch.float32).view(rows, 6) + 1000 * number
    return {"hidden": (base % 251).bfloat16(), "residual": base}


def stream_of_steps(fabric: Fabric, rows: list[int], depth: int) -> Any:
    """Rank 0 hands every step to rank 1, which reads it in a program of its stream."""
    accelerator = BACKEND.open(0)
    compute = accelerator.stream(Role.COMPUTE)
    place = Place(fabric=fabric, accelerator=accelerator, stream=compute, deadline=SOON)
    plan = ChannelPlan(name="0 to 1", source=0, destination=1, template=TEMPLATE, depth=depth)
    wrong: list[int] = []
    if fabric.control.rank == 0:
        sender = open_sender(plan, place)
        for number, count in enumerate(rows):
            compute.launch(lambda n=number, c=count: sender.send(step(n, c)))  # type: ignore[misc]
        compute.synchronize(SOON)
        sender.drain()
        told = sender.statistics
    else:
        receiver = open_receiver(plan, place)
        ahead = min(depth, len(rows))
        for count in rows[:ahead]:
            receiver.expect(count)
        for number, count in enumerate(rows):
            arrived = receiver.receive()

            def read(number: int = number, count: int = count, arrived: Any = arrived) -> None:
                expected = step(number, count)
                if not all(torch.equal(arrived[name], expected[name]) for name in expected):
                    wrong.append(number)
                arrived.release()

            compute.launch(read)
            del arrived, read
            if number + ahead < len(rows):
                receiver.expect(rows[number + ahead])
        compute.synchronize(SOON)
        told = receiver.statistics
    accelerator.close()
    return {"wrong": wrong, "told": vars(told)}
