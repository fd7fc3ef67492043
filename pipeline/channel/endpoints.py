"""The tensor channel: `Sender` and `Receiver`, the two ends of an edge with a fixed template."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from equipoise.hal.errors import ShapeClassError
from equipoise.pipeline.channel.edge import Edge, EdgeContext, open_edge
from equipoise.pipeline.channel.recv import ReceivingEnd, RecvHandle
from equipoise.pipeline.channel.schema import SchemaTemplate
from equipoise.pipeline.channel.send import SendHandle, SendingEnd
from equipoise.pipeline.channel.statistics import EdgeStatistics
from equipoise.pipeline.intermediate_tensors import AsyncIntermediateTensors


@dataclass(frozen=True, kw_only=True)
class ChannelSpec:
    """Parameters of a channel; equal at both ends.

    Attributes:
        name: of the edge; unique among the edges of a run.
        source: rank of the run that sends.
        destination: rank of the run that receives.
        template: the tensors of every step.
        depth: buffers at each end.
    """

    name: str
    source: int
    destination: int
    template: SchemaTemplate
    depth: int = 4

    def open(self, context: EdgeContext) -> Edge:
        """Open this rank's end of the edge; collective of both ranks. Raises as `open_edge`."""
        ends, parameters = (self.source, self.destination), json.loads(self.template.to_json())
        return open_edge(self.name, ends, context, self.depth, parameters)


class Sender:
    """The sending end of a channel; `SendingEnd` documents when it waits."""

    def __init__(self, spec: ChannelSpec, edge: Edge) -> None:
        self._template = spec.template
        self._edge = edge
        self._end = SendingEnd(edge)
        self._end.reserve(spec.template.schema_for(spec.template.max_rows))

    def has_free_buffer(self) -> bool:
        """Whether `send` would not wait for a buffer."""
        return self._end.has_free_buffer()

    def send(self, tensors: Mapping[str, Tensor]) -> SendHandle:
        """Send the tensors of one step: those of the template, each [rows, ...].

        Raises what `SendingEnd.send` raises.
        """
        row_counts = (t.shape[0] for t in tensors.values() if isinstance(t, Tensor) and t.dim())
        return self._end.send(tensors, self._template.schema_for(next(row_counts, 0)))

    def borrow_outputs(self, rows: int) -> Mapping[str, Tensor]:
        """Return the next step's tensors, [rows, ...], in their send buffer; filled in place they
        need no packing. See `SendingEnd.borrow_outputs`."""
        return self._end.borrow_outputs(self._template.schema_for(rows))

    def drain(self) -> None:
        """Wait until every message has left its buffer."""
        self._end.drain()

    @property
    def statistics(self) -> EdgeStatistics:
        """The counters as they are now."""
        return self._edge.counters.snapshot()

    def close(self) -> None:
        """Refuse further messages and close the edge's communicator; bounded by its deadline.

        After a `drain` nothing is lost.
        """
        self._end.close()
        self._edge.close()


class Receiver:
    """The receiving end of a channel; `ReceivingEnd` documents when it waits."""

    def __init__(self, spec: ChannelSpec, edge: Edge) -> None:
        self._template = spec.template
        self._edge = edge
        self._end = ReceivingEnd(edge)
        self._end.reserve(spec.template.schema_for(spec.template.max_rows))

    @property
    def can_post_ahead(self) -> bool:
        """Whether a receive may be posted ahead without blocking other communicators."""
        return self._edge.communicator.capabilities.independent_groups

    @property
    def num_expected(self) -> int:
        """Number of steps that are expected and have not been received."""
        return self._end.num_expected

    def has_free_buffer(self) -> bool:
        """Whether `expect` would find a free buffer without waiting for a reader."""
        return self._end.has_free_buffer()

    def expect(self, rows: int) -> None:
        """Post the receive of one more step with `rows` rows. Raises as `ReceivingEnd.expect`."""
        self._end.expect(self._template.schema_for(rows))

    def receive(self) -> AsyncIntermediateTensors:
        """Return the tensors of the next step, possibly still on their way.

        Raises as `ReceivingEnd.receive`.
        """
        return self._end.receive()

    def take(self, rows: int) -> tuple[dict[str, Tensor], RecvHandle]:
        """Return the tensors of the next step, and a handle to wait for before reading them.

        For engines, which wait by themselves and run a step with more rows than it has, such as the
        size of a captured graph that only they know. What the rows behind those of the step hold is
        not defined, but finite if all tensors of the channel have one dtype: zeros, or elements of
        this or an earlier message.

        Args:
            rows: rows of the tensors, from those of the step to `max_rows` of the template.

        Raises:
            ShapeClassError: more rows than `max_rows`.
            ChannelError: no message is expected.
            CommunicatorFailed: a gather cannot be issued.
        """
        if rows > self._template.max_rows:
            raise ShapeClassError(f"{rows} rows: the channel has {self._template.max_rows}")
        return self._end.take(rows)

    def drain(self) -> None:
        """Wait for every step that was received, and check its header."""
        self._end.drain()

    @property
    def statistics(self) -> EdgeStatistics:
        """The counters as they are now."""
        return self._edge.counters.snapshot()

    def close(self) -> None:
        """Refuse further messages and close the edge's communicator; bounded by its deadline.

        After a `drain` nothing is lost.
        """
        self._end.close()
        self._edge.close()


def open_sender(spec: ChannelSpec, context: EdgeContext) -> Sender:
    """Open the sending end, on the rank `spec.source`; collective of both ranks.

    Raises:
        ShapeClassError: the other end has another spec; on both, before anything is sent.
        BallotIncomplete: the other end did not open the channel by the deadline.
        CommunicatorFailed: the other end did not open the communicator by the deadline.
    """
    return Sender(spec, spec.open(context))


def open_receiver(spec: ChannelSpec, context: EdgeContext) -> Receiver:
    """Open the receiving end, on the rank `spec.destination`; collective of both ranks.

    Raises as `open_sender`.
    """
    return Receiver(spec, spec.open(context))
