"""The tensor channel: one edge, agreed on by both ends before anything is sent over it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from equipoise.pipeline.channel.edge import Edge, EdgeContext, open_edge
from equipoise.pipeline.channel.recv import ReceivingEnd
from equipoise.pipeline.channel.schema import SchemaTemplate
from equipoise.pipeline.channel.send import SendHandle, SendingEnd
from equipoise.pipeline.channel.statistics import EdgeStatistics
from equipoise.pipeline.intermediate_tensors import AsyncIntermediateTensors


@dataclass(frozen=True, kw_only=True)
class ChannelSpec:
    """What both ends must say alike.

    Attributes:
        name: of the edge; no two edges of a run have one name.
        source: rank of the run that sends.
        destination: rank of the run that receives.
        template: what travels in every step.
        depth: buffers at each end.
    """

    name: str
    source: int
    destination: int
    template: SchemaTemplate
    depth: int = 4

    def open(self, place: EdgeContext) -> Edge:
        """This rank's end of the edge; collective of the two ranks. Raises as `open_edge`."""
        ends, said = (self.source, self.destination), json.loads(self.template.to_json())
        return open_edge(self.name, ends, place, self.depth, said)


class Sender:
    """The sending end of a channel; see `SendingEnd` for how it waits."""

    def __init__(self, plan: ChannelSpec, edge: Edge) -> None:
        self._template = plan.template
        self._edge = edge
        self._end = SendingEnd(edge)
        self._end.reserve(plan.template.schema_for(plan.template.max_rows))

    def has_free_buffer(self) -> bool:
        """Whether `send` would not wait for a buffer."""
        return self._end.has_free_buffer()

    def send(self, tensors: Mapping[str, Tensor]) -> SendHandle:
        """Hand over one step: the template's tensors, [rows, ...] all of them.

        Raises what `SendingEnd.send` raises.
        """
        given = (t.shape[0] for t in tensors.values() if isinstance(t, Tensor) and t.dim())
        return self._end.send(tensors, self._template.schema_for(next(given, 0)))

    def borrow_outputs(self, rows: int) -> Mapping[str, Tensor]:
        """The next step's tensors, [rows, ...], where they are sent from: written there they need
        not be packed. See `SendingEnd.outgoing`."""
        return self._end.borrow_outputs(self._template.schema_for(rows))

    def drain(self) -> None:
        """Wait until every message has left its buffer."""
        self._end.drain()

    @property
    def statistics(self) -> EdgeStatistics:
        """Counts by now."""
        return self._edge.counters.snapshot()

    def close(self) -> None:
        """Refuse what comes from now on, and give the edge's communicator back; bounded by its
        deadline. Behind a `drain`, or `settle`, nothing is lost."""
        self._end.close()
        self._edge.close()


class Receiver:
    """The receiving end of a channel; see `ReceivingEnd` for how it waits."""

    def __init__(self, plan: ChannelSpec, edge: Edge) -> None:
        self._template = plan.template
        self._edge = edge
        self._end = ReceivingEnd(edge)
        self._end.reserve(plan.template.schema_for(plan.template.max_rows))

    @property
    def can_post_ahead(self) -> bool:
        """Whether a receive that is posted ahead keeps no other communicator waiting."""
        return self._edge.communicator.capabilities.independent_groups

    @property
    def num_expected(self) -> int:
        """How many steps are expected that nobody has taken."""
        return self._end.num_expected

    def has_free_buffer(self) -> bool:
        """Whether `expect` would not wait for a reader to let go of a buffer."""
        return self._end.has_free_buffer()

    def expect(self, rows: int) -> None:
        """Post the receive of one more step of so many rows. Raises as `ReceivingEnd.expect`."""
        self._end.expect(self._template.schema_for(rows))

    def receive(self) -> AsyncIntermediateTensors:
        """The tensors of the next step, on their way. Raises as `ReceivingEnd.receive`."""
        return self._end.receive()

    def drain(self) -> None:
        """Wait for every step that was taken, and look at its header."""
        self._end.drain()

    @property
    def statistics(self) -> EdgeStatistics:
        """Counts by now."""
        return self._edge.counters.snapshot()

    def close(self) -> None:
        """Refuse what comes from now on, and give the edge's communicator back; bounded by its
        deadline. Behind a `drain`, or `settle`, nothing is lost."""
        self._end.close()
        self._edge.close()


def open_sender(plan: ChannelSpec, place: EdgeContext) -> Sender:
    """This rank's end, of the plan's source; collective of the two ranks.

    Raises:
        ShapeClassError: the other end has another plan; on both, before anything is sent.
        BallotIncomplete: the other end did not come by the deadline.
        CommunicatorFailed: neither did it to the communicator.
    """
    return Sender(plan, plan.open(place))


def open_receiver(plan: ChannelSpec, place: EdgeContext) -> Receiver:
    """This rank's end, of the plan's destination; collective of the two ranks.

    Raises as `open_sender`.
    """
    return Receiver(plan, plan.open(place))
