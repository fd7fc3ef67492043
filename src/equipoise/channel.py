"""`TensorChannel`: tensors from one rank to another, one message a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from equipoise.connection import Connection
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
    """

    name: str
    source: int
    destination: int
    tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]
    rows: int
    depth: int = 4

    def sender(self, ranks: Connection) -> Sender:
        """The source's end: `send({name: tensor})` in a program of `ranks.compute`, then `drain()`.

        Raises:
            ChannelError: this rank is not the source.
            ShapeClassError: the other end says something else; on both, before anything is sent.
            BallotIncomplete: the other end did not come by the deadline.
        """
        if ranks.rank != self.source:
            raise ChannelError(f"{self.name}: rank {self.source} sends, not rank {ranks.rank}")
        return open_sender(self._plan(), self._place(ranks))

    def receiver(self, ranks: Connection) -> Receiver:
        """The destination's end: `expect(rows)` posts a receive, `receive()` returns its
        `AsyncIntermediateTensors`, whose first read waits. Raises as `sender`."""
        if ranks.rank != self.destination:
            raise ChannelError(
                f"{self.name}: rank {self.destination} receives, not rank {ranks.rank}"
            )
        return open_receiver(self._plan(), self._place(ranks))

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
