"""Ways to hand activations from stage to stage, over messages of torch.distributed.

*blocking* is rendezvous: one message per tensor, neither side does anything else meanwhile. It is
the fair variant: shapes are known on both sides, and the tensors received into are made once.

*coordinator* is the group coordinator's pattern of today's engines, written again from its
description. A step's message is: the length of the metadata, the metadata (a pickled list of names,
dtypes and shapes), then one message per tensor. The host of the receiver blocks until the metadata
are there, makes fresh tensors, and begins to receive into them; whoever first reads them waits. The
sender waits for its sends at the top of its next step, since vLLM pull request 54962: without that
wait the next forward wrote over what was still being sent. Pickle is what is measured here, so it
is used, here and nowhere else.

Two hosts do so. One computes by itself, as on a CPU: it sends the metadata when a step was
computed. The other, as on a GPU, runs ahead of its device (`pipeline_rank.HostAheadStage`): it
sends the metadata when it launches a step, and the device is what waits for messages. There they
are ordered as NCCL orders them: a receive begins when what was launched before it has ended, and
the next step begins when the last one's sends have ended.

A step is always the same (`pipeline_rank.py`): `begin`, `receive`, the host prepares its inputs,
`read`, compute, `release`, `send`; `drain` is the last call. A stage's compute is a timed wait in
proportion to its rows: how long a row takes follows from what is swept, the time that the rows'
transfer takes on the link over that of their compute. No stage is shorter than `FLOOR`: layers of a
large model read their weights for one token, too. Four stages were published with 110 ms a token
(vllm-ascend pull request 7143), 27 ms each.
"""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Fabric

STAGES = 2
"""Of the main case. Four time-slice on two cores, and are reported."""
HIDDEN = 7168
"""Elements of a row, of DeepSeek-V3 and Kimi-K2. A smaller one is the same as fewer tokens."""
TOKENS = (1, 64, 512)
RATIOS = (0.5, 0.75, 1.0)
"""Time of a transfer over that of a stage's compute."""
WIDTH = 2
"""Bytes of an element, bfloat16."""
TENSORS = 2
"""That travel in a step: hidden states and residual."""
FLOOR = 16e-3
"""Seconds of a stage's compute at least."""
PREPARE = 0.1
"""Part of a stage's time in which the host prepares the step's inputs and needs no activations."""
WARM, SECONDS, FEWEST, MOST = 8, 0.6, 24, 150
"""Micro-batches before the measured ones; seconds of compute that those take, and their bounds."""


def in_flight(stages: int) -> int:
    """Micro-batches of a pipeline: enough for every stage and every transfer to have one."""
    return 3 * stages


def message_bytes(hidden: int, rows: int) -> int:
    """That travel from one stage to the next."""
    return TENSORS * WIDTH * hidden * rows


class Handle:
    """A work of torch.distributed; a second wait for a finished send would never end."""

    def __init__(self, work: Any, tensor: Tensor, deadline: timedelta) -> None:
        self._pending = [(work, tensor)]
        self._deadline = deadline

    def result(self) -> None:
        """Block until it ended; any number of times. Raises what the transport raises."""
        while self._pending:
            work, _ = self._pending[0]
            work.wait(self._deadline)
            self._pending.pop()


class Wire:
    """A process group."""

    def __init__(self, group: Any, deadline: float) -> None:
        self._group = group
        self._deadline = timedelta(seconds=deadline)

    def isend(self, tensor: Tensor, rank: int) -> Handle:
        """Begin to send a contiguous tensor."""
        work = distributed.isend(tensor, rank, group=self._group)
        return Handle(work, tensor, self._deadline)

    def irecv(self, tensor: Tensor, rank: int) -> Handle:
        """Begin to receive into a contiguous tensor."""
        work = distributed.irecv(tensor, rank, group=self._group)
        return Handle(work, tensor, self._deadline)


class Wires:
    """Process groups of torch.distributed, which is initialised."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._wires: dict[str, Wire] = {}

    def open(self, purpose: str) -> Wire:
        """The wire for a purpose, made when it is first asked for: by all ranks, in one order."""
        if purpose not in self._wires:
            timeout = timedelta(seconds=self._deadline)
            group = distributed.new_group(backend="gloo", timeout=timeout, group_desc=purpose)
            self._wires[purpose] = Wire(group, self._deadline)
        return self._wires[purpose]


DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Batch:
    """A micro-batch's pass through the stages.

    Attributes:
        step: its number in the run, the same on every stage.
        rows: of its activations.
        seconds: of a stage's compute.
    """

    step: int
    rows: int
    seconds: float


@dataclass(frozen=True)
class Point:
    """What is swept.

    Attributes:
        hidden: elements of a row.
        tokens: rows of every micro-batch.
        ratio: seconds of a transfer on the idle link over those of a stage's compute.
    """

    hidden: int
    tokens: int
    ratio: float

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.hidden} x {self.tokens}, {self.ratio:g}"

    def compute(self, transfer: float) -> float:
        """Seconds of a stage, where the transfer takes so many."""
        return max(FLOOR, transfer / self.ratio)

    def batches(self, seconds: Mapping[int, float], in_flight: int) -> list[Batch]:
        """Every micro-batch, in order; `seconds` of a transfer by bytes."""
        compute = self.compute(seconds[message_bytes(self.hidden, self.tokens)])
        steps = WARM + in_flight + count(compute)
        return [Batch(step, self.tokens, compute) for step in range(steps)]


def count(seconds: float) -> int:
    """Measured micro-batches, where a stage takes so long."""
    return max(FEWEST, min(MOST, round(SECONDS / seconds)))


def points() -> tuple[Point, ...]:
    """All."""
    return tuple(Point(HIDDEN, t, r) for t in TOKENS for r in RATIOS)


@dataclass(frozen=True)
class Activations:
    """bfloat16 [rows, hidden] each."""

    hidden: Tensor
    residual: Tensor

    @staticmethod
    def empty(rows: int, hidden: int) -> "Activations":
        """Of no particular content."""
        return Activations(
            torch.empty(rows, hidden, dtype=DTYPE), torch.empty(rows, hidden, dtype=DTYPE)
        )

    def first(self, rows: int) -> "Activations":
        """The first so many rows, contiguous."""
        return Activations(self.hidden[:rows], self.residual[:rows])

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.hidden, self.residual))


@dataclass(frozen=True)
class Station:
    """Where a stage stands.

    Attributes:
        rank: its number; the first has 0.
        ranks: how many stages.
        wires: for those who need no more than messages.
        fabric: for those who need communicators.
        accelerator: for those who need streams.
        hidden: elements of a row.
        most: rows of the largest micro-batch.
        label: of the run; no two have the same.
        deadline: seconds that any wait may last.
    """

    rank: int
    ranks: int
    wires: Wires
    fabric: Fabric
    accelerator: Accelerator
    hidden: int
    most: int
    label: str
    deadline: float

    @property
    def in_flight(self) -> int:
        """Micro-batches that are under way."""
        return in_flight(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether it receives tokens instead of activations."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether it sends tokens instead of activations."""
        return self.rank == self.ranks - 1


class ReceivedActivations:
    """Activations that have come."""

    def __init__(self, activations: Activations) -> None:
        self._activations = activations

    def read(self) -> Activations:
        """The activations, once they are there."""
        return self._activations

    def release(self) -> None:
        """Nobody writes to them before the next `receive`."""


class Blocking:
    """Rendezvous, one tensor after the other."""

    messages = 2

    def __init__(self, station: Station) -> None:
        self._rank = station.rank
        self._wire = station.wires.open("blocking")
        self._out, self._in = (Activations.empty(station.most, station.hidden) for _ in range(2))

    def begin(self, batch: Batch) -> None:
        """Nothing is left over from the step before."""

    def receive(self, batch: Batch) -> ReceivedActivations:
        """One tensor after the other."""
        activations = self._in.first(batch.rows)
        for tensor in activations:
            self._wire.irecv(tensor, self._rank - 1).result()
        return ReceivedActivations(activations)

    def outgoing(self, batch: Batch) -> Activations:
        """Always the same tensors: they have been sent before they are written again."""
        return self._out.first(batch.rows)

    def send(self, batch: Batch, output: Activations) -> None:
        """One tensor after the other."""
        for tensor in output:
            self._wire.isend(tensor, self._rank + 1).result()

    def drain(self) -> None:
        """Every send has ended."""


Described = list[tuple[str, torch.dtype, torch.Size]]


class ArrivingActivations:
    """Activations whose handles are waited for by whoever reads first."""

    def __init__(self, tensors: dict[str, Tensor], handles: Sequence[Handle]) -> None:
        self._tensors = tensors
        self._handles = list(handles)

    def read(self) -> Activations:
        """The activations, once they are there."""
        while self._handles:
            self._handles[0].result()
            self._handles.pop(0)
        return Activations(self._tensors["hidden_states"], self._tensors["residual"])

    def release(self) -> None:
        """They go when nobody refers to them any more."""


class Coordinator:
    """Pickled metadata, then tensors that are waited for when they are first read."""

    messages = 4

    def __init__(self, station: Station) -> None:
        self._rank = station.rank
        self._metadata_wire = station.wires.open("coordinator, metadata")
        self._wire = station.wires.open("coordinator")
        self._out = Activations.empty(station.most, station.hidden)
        self._handles: list[Handle] = []

    def begin(self, batch: Batch) -> None:
        """Wait for the sends of the step before: the forward writes to their tensors again."""
        self.drain()

    def receive(self, batch: Batch) -> ArrivingActivations:
        """Blocks for the metadata; the activations come later."""
        return self.receive_tensors(self.receive_metadata())

    def receive_metadata(self) -> dict[str, Tensor]:
        """Blocks for the metadata; returns fresh tensors to receive into."""
        source = self._rank - 1
        length = torch.empty(1, dtype=torch.int64)
        self._metadata_wire.irecv(length, source).result()
        content = torch.empty(int(length.item()), dtype=torch.uint8)
        self._metadata_wire.irecv(content, source).result()
        described: Described = pickle.loads(content.numpy().tobytes())
        return {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in described}

    def receive_tensors(self, tensors: dict[str, Tensor]) -> ArrivingActivations:
        """Begins to receive into them."""
        handles = [self._wire.irecv(tensor, self._rank - 1) for tensor in tensors.values()]
        return ArrivingActivations(tensors, handles)

    def outgoing(self, batch: Batch) -> Activations:
        """The forward's own output, the same tensors in every step."""
        return self._out.first(batch.rows)

    def send(self, batch: Batch, output: Activations) -> None:
        """Begins all messages of the step."""
        self._handles += self.send_metadata(output)
        self.send_tensors(output)

    def send_metadata(self, output: Activations) -> list[Handle]:
        """Begins the two messages of the metadata."""
        tensors = {"hidden_states": output.hidden, "residual": output.residual}
        described: Described = [(name, t.dtype, t.shape) for name, t in tensors.items()]
        content = torch.frombuffer(bytearray(pickle.dumps(described)), dtype=torch.uint8)
        length = torch.tensor([content.numel()], dtype=torch.int64)
        return [self._metadata_wire.isend(part, self._rank + 1) for part in (length, content)]

    def send_tensors(self, output: Activations) -> None:
        """Begins the messages of the tensors."""
        self._handles += [self._wire.isend(tensor, self._rank + 1) for tensor in output]

    def drain(self) -> None:
        """Wait for what has been sent."""
        while self._handles:
            self._handles[0].result()
            self._handles.pop(0)
