"""`TensorChannel`: tensors from one rank to another, one message a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from equipoise.connection import Connection
from equipoise.hal.arguments import short_text, whole_number
from equipoise.hal.errors import ChannelError
from equipoise.pipeline.channel.edge import EdgeContext
from equipoise.pipeline.channel.endpoints import (
    ChannelSpec,
    Receiver,
    Sender,
    open_receiver,
    open_sender,
)
from equipoise.pipeline.channel.schema import RowField, SchemaTemplate


@dataclass(frozen=True, kw_only=True)
class TensorChannel:
    """What travels from one rank to another in every step; both ranks say the same.

    The source calls `sender` and the destination `receiver`, in the same order of channels. Nothing
    is described or pickled on the way: a step is one packed message, received into a ring of
    buffers.

    Attributes:
        name: no two open channels of a run have one name.
        source: rank that sends.
        destination: rank that receives.
        tensors: by name, the shape of one row and the dtype. A step carries [rows, *shape] of each.
        rows: of the largest step.
        depth: buffers at each end: so many steps may be under way.

    Raises:
        ChannelError: one of them cannot be; names it.
    """

    name: str
    source: int
    destination: int
    tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]
    rows: int
    depth: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ChannelError(f"name must be a text, got {short_text(self.name)}")
        for field, least in (("source", 0), ("destination", 0), ("rows", 1), ("depth", 1)):
            value = getattr(self, field)
            number = whole_number(f"{self.name}: {field}", value, ChannelError, least=least)
            object.__setattr__(self, field, number)
        if self.source == self.destination:
            raise ChannelError(f"{self.name}: source and destination are both rank {self.source}")
        if not isinstance(self.tensors, Mapping) or not self.tensors:
            got = short_text(self.tensors)
            raise ChannelError(f"{self.name}: tensors must map names to shape and dtype, got {got}")
        for name, description in self.tensors.items():
            _check_tensor(f"{self.name}: tensors", name, description)

    def sender(self, ranks: Connection) -> Sender:
        """The source's end: `send({name: tensor})` in a program of `ranks.compute`, then `drain()`.

        Raises:
            ChannelError: this rank is not the source, or the run has no such destination.
            ShapeClassError: the other end says something else; on both, before anything is sent.
            BallotIncomplete: the other end did not come by the deadline.
        """
        if ranks.rank != self.source:
            raise ChannelError(f"{self.name}: rank {self.source} sends, not rank {ranks.rank}")
        self._check_peer(ranks, "destination", self.destination)
        return open_sender(self._plan(), self._place(ranks))

    def receiver(self, ranks: Connection) -> Receiver:
        """The destination's end: `expect(rows)` posts a receive, `receive()` returns its
        `AsyncIntermediateTensors`, whose first read waits. Raises as `sender`."""
        if ranks.rank != self.destination:
            raise ChannelError(
                f"{self.name}: rank {self.destination} receives, not rank {ranks.rank}"
            )
        self._check_peer(ranks, "source", self.source)
        return open_receiver(self._plan(), self._place(ranks))

    def _check_peer(self, ranks: Connection, field: str, rank: int) -> None:
        """Raises `ChannelError` for a rank that is not there: this one would wait for it."""
        if rank >= ranks.size:
            raise ChannelError(f"{self.name}: {field} is rank {rank}, there are {ranks.size} ranks")

    def _plan(self) -> ChannelSpec:
        fields = (RowField(name, tuple(tail), kind) for name, (tail, kind) in self.tensors.items())
        return ChannelSpec(
            name=self.name,
            source=self.source,
            destination=self.destination,
            template=SchemaTemplate(tuple(fields), self.rows),
            depth=self.depth,
        )

    @staticmethod
    def _place(ranks: Connection) -> EdgeContext:
        return EdgeContext(
            fabric=ranks.fabric,
            accelerator=ranks.accelerator,
            stream=ranks.compute,
            deadline=ranks.deadline,
        )


def _check_tensor(field: str, name: object, description: object) -> None:
    """Raises `ChannelError` unless this is a name with the shape of a row and the dtype."""
    if not isinstance(name, str):
        raise ChannelError(f"{field}: a name must be a text, got {short_text(name)}")
    place = f"{field}: {name!r}"
    if not isinstance(description, tuple | list) or len(description) != 2:
        raise ChannelError(f"{place} must be (shape, dtype), got {short_text(description)}")
    shape, dtype = description
    if not isinstance(dtype, torch.dtype):
        raise ChannelError(f"{place}: dtype must be a torch.dtype, got {short_text(dtype)}")
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        raise ChannelError(f"{place}: shape must be that of one row, got {short_text(shape)}")
    for size in shape:
        whole_number(f"{place}: shape", size, ChannelError, least=0)
