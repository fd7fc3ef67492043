"""How activations come to a stage and go on from it: what is compared, in one small protocol.

A step of a stage is always the same (`pipeline_stage.py`): `begin`, `receive`, the host prepares
its inputs, `read`, compute, `release`, `send`. Everything is called by the stage's one thread.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from pipeline_emulation import in_flight
from torch import Tensor
from wire import Wires

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Fabric

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Batch:
    """A micro-batch's pass through the stages.

    Attributes:
        step: its number in the run, the same on every stage.
        rows: of its activations.
        seconds: of a stage's compute.
        left: passes of the run behind this one; nobody has to expect more.
        scheduled: rows of the passes behind it that a scheduler has told every stage of by then:
            those of the other micro-batches in flight.
    """

    step: int
    rows: int
    seconds: float
    left: int
    scheduled: tuple[int, ...] = ()


def scheduled(batches: Sequence[Batch], flying: int) -> list[Batch]:
    """The same, each with what is known of those behind it while `flying` are in flight."""
    rows = [batch.rows for batch in batches]
    return [
        replace(batch, scheduled=tuple(rows[n + 1 : n + flying])) for n, batch in enumerate(batches)
    ]


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


class Received(Protocol):
    """Activations that have come, or are about to."""

    def read(self) -> Activations:
        """Them, once they are there."""
        ...

    def release(self) -> None:
        """They will not be read again."""
        ...


class Handover(Protocol):
    """A way to hand activations from stage to stage."""

    @property
    def messages(self) -> int:
        """That go to the next stage in a step."""
        ...

    def begin(self, batch: Batch) -> None:
        """The top of a step."""
        ...

    def receive(self, batch: Batch) -> Received:
        """What the stage before sends for this step; not asked on the first stage."""
        ...

    def outgoing(self, batch: Batch) -> Activations:
        """Where this step's output is to be written; not asked on the last stage."""
        ...

    def send(self, batch: Batch, output: Activations) -> None:
        """To the next stage: what was written into `outgoing`; not asked on the last stage."""
        ...

    def drain(self) -> None:
        """The last call: waits until everything has arrived, and gives back what was opened."""
        ...
