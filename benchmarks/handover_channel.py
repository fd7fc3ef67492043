"""The tensor channel of this project: one message a step.

Receives are posted as soon as it is known how many rows are to come, and outputs are written where
they are sent from.
"""

from handover import DTYPE, Activations, Batch, Station

from equipoise.hal.stream import Role
from equipoise.pipeline.channel import (
    ChannelPlan,
    Receiver,
    Sender,
    open_receiver,
    open_sender,
)
from equipoise.pipeline.opening import Place
from equipoise.pipeline.template import RowField, Template
from equipoise.pipeline.tensors import AsyncIntermediateTensors


class Handed:
    """A step on its way. See `Received`."""

    def __init__(self, mapping: AsyncIntermediateTensors) -> None:
        self._mapping = mapping

    def read(self) -> Activations:
        """See `Received`."""
        return Activations(self._mapping["hidden"], self._mapping["residual"])

    def release(self) -> None:
        """See `Received`."""
        self._mapping.release()


class Channel:
    """See `Handover`."""

    messages = 1

    def __init__(self, station: Station) -> None:
        self._station = station
        self._depth = station.in_flight + 1
        self._place = Place(
            fabric=station.fabric,
            accelerator=station.accelerator,
            stream=station.accelerator.stream(Role.COMPUTE),
            deadline=station.deadline,
        )
        self._before = self._receiver() if station.rank else None
        self._after = None if station.is_last else self._sender()
        self._expected = 0

    def begin(self, batch: Batch) -> None:
        """Post what the schedule has told of, as far as there are buffers that nobody reads."""
        if self._before is None:
            return
        if self._expected == batch.step:
            self._expect(self._before, batch.rows)
        for rows in batch.scheduled[self._expected - batch.step - 1 :]:
            if not self._before.room():
                return
            self._expect(self._before, rows)

    def receive(self, batch: Batch) -> Handed:
        """The oldest of the steps that are expected."""
        assert self._before is not None
        return Handed(self._before.receive())

    def outgoing(self, batch: Batch) -> Activations:
        """Where it is sent from."""
        assert self._after is not None
        lent = self._after.outgoing(batch.rows)
        return Activations(lent["hidden"], lent["residual"])

    def send(self, batch: Batch, output: Activations) -> None:
        """By the stream, while this thread goes on."""
        assert self._after is not None
        self._after.send({"hidden": output.hidden, "residual": output.residual})

    def drain(self) -> None:
        """See `Handover`."""
        for end in (self._before, self._after):
            if isinstance(end, Receiver):
                end.settle()
            elif end is not None:
                end.drain()
            if end is not None:
                end.close()

    def _expect(self, receiver: Receiver, rows: int) -> None:
        receiver.expect(rows)
        self._expected += 1

    def _receiver(self) -> Receiver:
        return open_receiver(self._plan(self._station.rank - 1), self._place)

    def _sender(self) -> Sender:
        return open_sender(self._plan(self._station.rank), self._place)

    def _plan(self, source: int) -> ChannelPlan:
        tail = (self._station.hidden,)
        fields = tuple(RowField(name, tail, DTYPE) for name in ("hidden", "residual"))
        return ChannelPlan(
            name=f"{self._station.label}, {source} to {source + 1}",
            source=source,
            destination=source + 1,
            template=Template(fields, self._station.most),
            depth=self._depth,
        )
