"""Channels between ranks: what is lent and kept, what is lost, and what streams read."""

from functools import partial
from typing import Any

import torch
from helpers.rank_programs.call_outcome import outcome
from helpers.rank_programs.channels import hand_over, is_of, on_stream, place, plan, read_all, step
from helpers.rank_programs.operations import meet
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.hal.communicator import Fabric
from equipoise.pipeline.channel.endpoints import open_receiver, open_sender


def kept_of_a_loan(fabric: Fabric) -> Any:
    """A sender keeps a tensor that it was lent, and lets go of it when it has been told."""
    with place(fabric, deadline=WATCHDOG if fabric.control.rank else 1.0) as at:
        spec = plan(fabric.control.rank, depth=1)
        if fabric.control.rank == 1:
            return {"wrong": read_all(at, open_receiver(spec, at), [3, 3], 1)}
        sender = open_sender(spec, at)
        lent_tensors = dict(sender.borrow_outputs(3))
        for name, tensor in step(0, 3).items():
            lent_tensors[name].copy_(tensor)
        sender.send(lent_tensors)
        sender.drain()
        refusal = outcome(lambda: sender.send(step(1, 3)))
        unchanged = torch.equal(lent_tensors["residual"], step(0, 3)["residual"])
        lent_tensors.clear()
        sender.send(step(1, 3))
        sender.drain()
        return {"refused": refusal, "kept": unchanged, "wrong": []}


def opened_again(fabric: Fabric, times: int) -> Any:
    """An edge is opened, used and closed, again and again, under one name."""
    wrong = []
    with place(fabric) as at:
        spec = plan(fabric.control.rank)
        for _ in range(times):
            if fabric.control.rank == 0:
                sender = open_sender(spec, at)
                hand_over(at, sender, [2, 5])
                sender.close()
            else:
                receiver = open_receiver(spec, at)
                wrong += read_all(at, receiver, [2, 5], 2)
                receiver.close()
    return wrong


def lost_on_the_way(fabric: Fabric, backend: str) -> Any:
    """The sender of a step that streams would read leaves: the reader's host is told."""
    with place(fabric, backend=backend) as at:
        spec = plan(fabric.control.rank)
        if fabric.control.rank == 0:
            sender = open_sender(spec, at)
            hand_over(at, sender, [2])
            meet(fabric, "sent")
            return None
        receiver = open_receiver(spec, at)
        receiver.expect(2)
        receiver.expect(2)
        first, second = receiver.receive(), receiver.receive()
        first_is_right = on_stream(at, partial(is_of, first["residual"], 0))
        meet(fabric, "sent")
        errors = [outcome(receiver.drain)["error"] for _ in range(2)]
        del first, second
        return {"whole": first_is_right, "told": errors}


def read_before_it_was_sent(fabric: Fabric, backend: str) -> Any:
    """Streams are ordered behind a message that nobody has sent yet, and the host goes on."""
    with place(fabric, backend=backend) as at:
        spec = plan(fabric.control.rank)
        if fabric.control.rank == 0:
            sender = open_sender(spec, at)
            meet(fabric, "read")
            hand_over(at, sender, [3, 3])
            return []
        receiver = open_receiver(spec, at)
        copies: list[Tensor] = []
        for _ in range(2):
            receiver.expect(3)
            arrived = receiver.receive()
            at.stream.launch(partial(_copy, copies, arrived["residual"]))
            arrived.release()
        reached = at.accelerator.event()
        at.stream.record(reached)
        ready = reached.query()
        meet(fabric, "read")
        at.stream.synchronize(WATCHDOG)
        receiver.drain()
        return {"ready": ready, "seen": [is_of(copy, n) for n, copy in enumerate(copies)]}


def _copy(copies: list[Tensor], residual: Tensor) -> None:
    copies.append(residual.clone())
