"""Channels between ranks of the CPU backend."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from helpers.rank_programs.call_outcome import outcome
from helpers.rank_programs.operations import meet
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.hal import registry
from equipoise.hal.accelerator import open_for_rank
from equipoise.hal.communicator import Fabric
from equipoise.hal.stream import Role
from equipoise.pipeline.channel.edge import EdgeContext, SliceGroup
from equipoise.pipeline.channel.endpoints import (
    ChannelSpec,
    Receiver,
    Sender,
    open_receiver,
    open_sender,
)
from equipoise.pipeline.channel.schema import RowField, SchemaTemplate, SliceMode
from equipoise.pipeline.intermediate_tensors import AsyncIntermediateTensors

MOST = 32
Sending = Callable[[EdgeContext, Sender, int, int], None]


def template(
    split: SliceMode = SliceMode.WHOLE, dtype: torch.dtype = torch.bfloat16
) -> SchemaTemplate:
    """A hidden state and a residual."""
    hidden = RowField("hidden", (6,), dtype, split)
    return SchemaTemplate((hidden, RowField("residual", (6,), torch.float32, split)), max_rows=MOST)


def step(number: int, rows: int) -> dict[str, Tensor]:
    """What travels in one step, in the host's memory: no two steps are alike."""
    base = torch.arange(rows * 6, dtype=torch.float32).view(rows, 6) + 1000 * number
    return {"hidden": (base % 251).bfloat16(), "residual": base}


@contextmanager
def place(
    fabric: Fabric, deadline: float = WATCHDOG, parts: int = 1, backend: str = "cpu"
) -> Iterator[EdgeContext]:
    """Where this rank's ends are; ranks in fours have two on either side that share slices."""
    accelerator = open_for_rank(registry.accelerator(backend), fabric.control.rank)
    slices = None
    if parts > 1:
        side = fabric.control.rank // parts
        members = tuple(range(side * parts, (side + 1) * parts))
        communicators = [
            fabric.open(f"{purpose} of {side}", members) for purpose in ("gather", "compare")
        ]
        slices = SliceGroup(*communicators)
    yield EdgeContext(
        fabric=fabric,
        accelerator=accelerator,
        stream=accelerator.stream(Role.COMPUTE),
        deadline=deadline,
        slice_group=slices,
    )
    accelerator.close()


def plan(rank: int, depth: int = 4, parts: int = 1, **changed: Any) -> ChannelSpec:
    """From each rank of one side to its like on the other."""
    source = rank % parts
    schema = template(SliceMode.SLICED if parts > 1 else SliceMode.WHOLE, **changed)
    name = f"{source} to {source + parts}"
    return ChannelSpec(
        name=name, source=source, destination=source + parts, template=schema, depth=depth
    )


def hand_over(
    at: EdgeContext, sender: Sender, rows: Sequence[int], send: Sending | None = None
) -> None:
    """Every step by a program; the tensors are written over right behind it."""
    for number, count in enumerate(rows):
        at.stream.launch(partial(send or _send_and_scribble, at, sender, number, count))
    at.stream.synchronize(WATCHDOG)
    sender.drain()


def read_all(at: EdgeContext, receiver: Receiver, rows: Sequence[int], ahead: int) -> list[int]:
    """Read every step by a program; returns those that were not what was sent."""
    wrong: list[int] = []
    for count in rows[:ahead]:
        receiver.expect(count)
    for number, count in enumerate(rows):
        at.stream.launch(partial(_compare, receiver.receive(), number, count, wrong))
        if number + ahead < len(rows):
            receiver.expect(rows[number + ahead])
    at.stream.synchronize(WATCHDOG)
    receiver.drain()
    return wrong


def stream_of_steps(
    fabric: Fabric,
    rows: list[int],
    depth: int,
    ahead: int,
    parts: int,
    backend: str = "cpu",
    lent: bool = False,
) -> Any:
    """The first ranks hand every step to the others; `lent`: from where it is sent from."""
    with place(fabric, parts=parts, backend=backend) as at:
        spec = plan(fabric.control.rank, depth, parts)
        if fabric.control.rank < parts:
            sender = open_sender(spec, at)
            statistics = sender.statistics
            hand_over(at, sender, rows, _send_lent if lent else _send_and_scribble)
            return {"wrong": [], **vars(sender.statistics.since(statistics))}
        receiver = open_receiver(spec, at)
        statistics = receiver.statistics
        wrong = read_all(at, receiver, rows, ahead)
        return {"wrong": wrong, **vars(receiver.statistics.since(statistics))}


def steady(fabric: Fabric, steps: int) -> Any:
    """What a step costs once all classes are known: pickles, buffers, operations."""
    with place(fabric) as at, counting_calls(at) as counts:
        spec, rows = plan(fabric.control.rank), [8] * steps
        if fabric.control.rank == 0:
            sender = open_sender(spec, at)
            hand_over(at, sender, [8] * 4)
            counts.clear()
            hand_over(at, sender, rows)
        else:
            receiver = open_receiver(spec, at)
            read_all(at, receiver, [8] * 4, 4)
            counts.clear()
            read_all(at, receiver, rows, 4)
        return dict(counts)


@contextmanager
def counting_calls(at: EdgeContext) -> Iterator[dict[str, int]]:
    """Counts what the channels of a place ask of pickle, of torch's memory and of communicators."""
    counts: dict[str, int] = {}

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return function(*arguments, **keywords)

        return call

    open_communicator = at.fabric.open

    def open_counted(purpose: str, ranks: Sequence[int] | None = None) -> Any:
        communicator = open_communicator(purpose, ranks)
        for name in ("isend", "irecv", "exchange", "broadcast", "all_gather"):
            setattr(communicator, name, counting(name, getattr(communicator, name)))
        return communicator

    pickle = sys.modules["pickle"]  # torch has brought it
    healthy = (pickle.dumps, pickle.loads, torch.empty)
    vars(pickle).update(dumps=counting("pickle", healthy[0]), loads=counting("pickle", healthy[1]))
    torch.empty = counting("empty", healthy[2])
    vars(at.fabric)["open"] = open_counted
    try:
        yield counts
    finally:
        vars(pickle).update(dumps=healthy[0], loads=healthy[1])
        torch.empty = healthy[2]


def opened_otherwise(fabric: Fabric, other: str) -> Any:
    """The ends do not say the same."""
    rank = fabric.control.rank
    with place(fabric) as at:
        changed: dict[str, Any] = {}
        if rank == 1:
            changed = {"dtype": torch.float16} if other == "dtype" else {"depth": 2}
        spec = plan(rank, **changed)
        return outcome(lambda: (open_receiver if rank else open_sender)(spec, at))


def keeper(fabric: Fabric, backend: str = "cpu") -> Any:
    """The receiver keeps a tensor of every step, the mappings long gone; then lets go."""
    rows = [3] * 6
    with place(fabric, deadline=1.0, backend=backend) as at:
        spec = plan(fabric.control.rank, depth=2)
        if fabric.control.rank == 0:
            sender = open_sender(spec, at)
            refusal = outcome(lambda: hand_over(at, sender, rows[:2]))
            meet(fabric, "let go")
            hand_over_from(at, sender, 2, rows)
            return refusal
        receiver = open_receiver(spec, at)
        kept_tensors: list[Tensor] = []
        for _ in range(2):
            receiver.expect(3)
            kept_tensors.append(receiver.receive()["residual"])
        late_expect = outcome(lambda: receiver.expect(3))
        kept_are_right = [on_stream(at, partial(is_of, t, n)) for n, t in enumerate(kept_tensors)]
        kept_tensors.clear()
        meet(fabric, "let go")
        next_are_right = []
        for number in range(2, 6):
            receiver.expect(3)
            with_step = receiver.receive()
            next_are_right.append(on_stream(at, partial(is_of, with_step["residual"], number)))
            with_step.release()
        return {"told": late_expect, "whole": kept_are_right, "seen": next_are_right}


def on_stream(at: EdgeContext, read: Callable[[], Any]) -> Any:
    """What a program of the stream that reads comes to."""
    values: list[Any] = []
    at.stream.launch(lambda: values.append(read()))
    at.stream.synchronize(WATCHDOG)
    return values[0]


def is_of(residual: Tensor, number: int) -> bool:
    """Whether it is that step's."""
    return torch.equal(residual.cpu(), step(number, residual.shape[0])["residual"])


def hand_over_from(at: EdgeContext, sender: Sender, first: int, rows: Sequence[int]) -> None:
    """Steps `first` and later."""
    for number in range(first, len(rows)):
        at.stream.launch(partial(_send_and_scribble, at, sender, number, rows[number]))
    at.stream.synchronize(WATCHDOG)
    sender.drain()


def drained_meanwhile(fabric: Fabric, rows: list[int]) -> Any:
    """The host drains, again and again, while programs of the stream hand over."""
    with place(fabric) as at:
        spec = plan(fabric.control.rank, depth=2)
        if fabric.control.rank == 1:
            return {"wrong": read_all(at, open_receiver(spec, at), rows, 2)}
        sender = open_sender(spec, at)
        for number, count in enumerate(rows):
            at.stream.launch(partial(_send_and_scribble, at, sender, number, count))
            sender.drain()
        at.stream.synchronize(WATCHDOG)
        sender.drain()
        return {"wrong": []}


def before_anybody_receives(fabric: Fabric, steps: int) -> Any:
    """As many steps as there are buffers are handed over before their receiver does anything."""
    with place(fabric) as at:
        spec = plan(fabric.control.rank, depth=steps)
        if fabric.control.rank == 0:
            sender = open_sender(spec, at)
            for number in range(steps):
                at.stream.launch(partial(_send_and_scribble, at, sender, number, 4))
            at.stream.synchronize(WATCHDOG)
            room = sender.has_free_buffer()
            meet(fabric, "handed over")
            sender.drain()
            return {"room": room, "wrong": []}
        receiver = open_receiver(spec, at)
        meet(fabric, "handed over")
        return {"wrong": read_all(at, receiver, [4] * steps, steps)}


def not_alike(fabric: Fabric) -> Any:
    """Ranks of one side declare what they send the same, and it is not; then it is."""
    rank, parts = fabric.control.rank, 2
    with place(fabric, parts=parts) as at:
        spec = plan(rank, parts=parts)
        if rank >= parts:
            receiver = open_receiver(spec, at)
            meet(fabric, "refused")
            return {"wrong": read_all(at, receiver, [4], 1)}
        sender = open_sender(spec, at)
        differing = {name: tensor + rank for name, tensor in step(0, 4).items()}
        refusal = outcome(lambda: sender.send(differing))
        meet(fabric, "refused")
        sender.send(step(0, 4))
        sender.drain()
        return {"told": refusal, "wrong": []}


def lost_sender(fabric: Fabric) -> Any:
    """The sender of a step leaves, with the step announced."""
    with place(fabric) as at:
        spec = plan(fabric.control.rank)
        if fabric.control.rank == 0:
            sender = open_sender(spec, at)
            sender.send(step(0, 2))
            sender.drain()
            meet(fabric, "sent")
            return None
        receiver = open_receiver(spec, at)
        receiver.expect(2)
        receiver.expect(2)
        first, second = receiver.receive(), receiver.receive()
        first_is_right = torch.equal(first["residual"], step(0, 2)["residual"])
        meet(fabric, "sent")
        reads = [outcome(lambda: second["residual"]) for _ in range(2)]
        errors = [(read["error"], read["text"]) for read in reads]
        return {"whole": first_is_right, "reads": errors, "later": outcome(receiver.drain)["error"]}


def in_a_graph(fabric: Fabric) -> Any:
    """Somebody captures a step that is handed over."""
    with place(fabric) as at:
        spec = plan(fabric.control.rank)
        if fabric.control.rank == 1:
            receiver = open_receiver(spec, at)
            receiver.expect(2)
            return outcome(lambda: receiver.receive()["hidden"])["error"]
        sender, graph = open_sender(spec, at), at.accelerator.graph()
        graph.capture(at.stream, lambda: sender.send(step(0, 2)))
        return outcome(sender.drain)["error"]


def _send_and_scribble(at: EdgeContext, sender: Sender, number: int, rows: int) -> None:
    device = at.accelerator.device
    tensors = {name: tensor.to(device) for name, tensor in step(number, rows).items()}
    sender.send(tensors)
    for tensor in tensors.values():
        tensor.fill_(-1)


def _send_lent(at: EdgeContext, sender: Sender, number: int, rows: int) -> None:
    lent_tensors = sender.borrow_outputs(rows)
    for name, tensor in step(number, rows).items():
        lent_tensors[name].copy_(tensor)
    sender.send(lent_tensors)


def _compare(arrived: AsyncIntermediateTensors, number: int, rows: int, wrong: list[int]) -> None:
    expected = step(number, rows)
    if not all(torch.equal(arrived[name].cpu(), expected[name]) for name in expected):
        wrong.append(number)
    arrived.release()
