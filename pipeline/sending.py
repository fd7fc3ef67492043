"""The end of an edge that sends."""

import threading
import time
from functools import partial

from equipoise.hal.errors import ChannelClosed, EquipoiseError
from equipoise.pipeline.buffer import Buffer, host_words
from equipoise.pipeline.departure import Departure
from equipoise.pipeline.edge import Edge
from equipoise.pipeline.framing import Announced, Frame, Framing
from equipoise.pipeline.header import Header
from equipoise.pipeline.layout import Layout, layout_of
from equipoise.pipeline.layouts import Layouts, Met
from equipoise.pipeline.packing import Tensors, bytes_tensor, check_fits, heads, pack
from equipoise.pipeline.replicas import check_replicated
from equipoise.pipeline.shape_class import ShapeClass


class _Berth:
    """A buffer, and the message that leaves it."""

    def __init__(self, edge: Edge) -> None:
        self.buffer = Buffer(edge.memory)
        self.words = host_words(edge.accelerator)
        self.passed = edge.accelerator.event()
        self.departure: Departure | None = None


class SendingEnd:
    """Packs what a stage made and sends it, one message a step.

    A message is packed by a program of the stage's stream into a buffer of the ring: what is
    launched behind it may overwrite the tensors at once. The buffer is used again when its message
    has left it, however long the receiver takes.

    Args:
        edge: whose end this is.
        framing: of its messages; one part and no description where the receiver is told.
    """

    def __init__(self, edge: Edge, framing: Framing | None = None) -> None:
        self._edge = edge
        self._framing = framing or Announced()
        self._layouts = Layouts(edge.parts, edge.meter)
        self._berths = [_Berth(edge) for _ in range(edge.depth)]
        self._ordered = edge.communicator.capabilities.stream_ordered
        self._packed = edge.accelerator.event()
        self._sequence = 0
        self._sending = threading.Lock()
        self._failure: EquipoiseError | None = None

    def room(self) -> bool:
        """Whether `send` would find a free buffer without waiting."""
        last = self._berths[self._sequence % self._edge.depth].departure
        return last is None or last.is_completed()

    def reserve(self, shape_class: ShapeClass) -> None:
        """Have memory for the largest class that is to come, so that none is made later on."""
        with self._sending:
            nbytes = layout_of(shape_class, self._edge.parts).nbytes
            for berth in self._berths:
                if berth.departure is None:
                    berth.buffer.make_room(nbytes)

    def send(self, tensors: Tensors, shape_class: ShapeClass) -> Departure:
        """Hand over one step; from the host, or from a program of the edge's stream.

        Args:
            tensors: by name, on the edge's device; read in the order of the edge's stream.
            shape_class: of the step, as the receiver expects it.

        Returns:
            The handle of the message. Nobody need wait for it: `send` itself waits where its
            buffer is still sent from, for the edge's deadline at most.

        Raises:
            ShapeClassError: these are not tensors of that class, on the edge's device.
            CommunicatorFailed: an earlier message could not be sent.
            NotReplicated: a sliced tensor differs between ranks (looked at in the first message
                of each class, which is then not sent; that takes a stop of the stream).
            ChannelClosed: the end was closed, or has failed before.
        """
        with self._sending:
            self._refuse_closed()
            check_fits(self._edge, shape_class, tensors)
            met, berth = self._layouts.of(shape_class), self._free_berth()
            if met.first:
                self._introduce(met.layout, tensors)
            return self._launch(berth, met, dict(tensors))

    def drain(self) -> None:
        """Wait until every message that was handed over has left its buffer.

        Raises what `Departure.wait` raises, and what has ended this end before.
        """
        with self._sending:
            departures = [berth.departure for berth in self._berths]
        for departure in departures:
            if departure is not None:
                departure.wait()
        if self._failure is not None and not isinstance(self._failure, ChannelClosed):
            raise self._failure

    def close(self) -> None:
        """Refuse what comes from now on; what is on its way goes on, in memory that it keeps."""
        self._failure = self._failure or ChannelClosed("it was closed")

    def _refuse_closed(self) -> None:
        if self._failure is not None:
            raise ChannelClosed(f"{self._edge.name}: {self._failure}") from self._failure

    def _free_berth(self) -> _Berth:
        berth = self._berths[self._sequence % self._edge.depth]
        if berth.departure is None:
            return berth
        began = time.monotonic_ns()
        try:
            berth.departure.wait()
        except EquipoiseError as failure:
            self._failure = failure
            raise
        self._edge.meter.waited(time.monotonic_ns() - began)
        return berth

    def _introduce(self, layout: Layout, tensors: Tensors) -> None:
        """A class whose first message is refused is as new at the next."""
        try:
            self._compare(layout, tensors)
        except EquipoiseError:
            self._layouts.forget(layout.shape_class)
            raise

    def _compare(self, layout: Layout, tensors: Tensors) -> None:
        """Sliced tensors of a class that is new are what the other ranks have."""
        if layout.sliced and self._edge.slices is not None:
            self._edge.stream.synchronize(self._edge.deadline)
            check_replicated(self._edge, self._edge.slices, layout, tensors)

    def _launch(self, berth: _Berth, met: Met, tensors: Tensors) -> Departure:
        edge, frame = self._edge, self._framing.frame(met)
        departure = Departure(self._sequence, berth.passed, edge.deadline)
        berth.buffer.make_room(frame.extent)
        digest, described = met.layout.shape_class.digest, len(frame.description)
        Header(self._sequence, digest, frame.nbytes, frame.first, described).write(berth.words)
        self._sequence += 1
        try:
            edge.stream.launch(partial(self._leave, berth, met.layout, frame, tensors, departure))
            edge.stream.record(berth.passed)
        except EquipoiseError as failure:
            self._failure = failure
            raise
        berth.departure = departure  # not before: who waits for it waits for what is recorded last
        edge.meter.message(frame.extent, described=described, parts=frame.parts)
        return departure

    def _leave(
        self, berth: _Berth, layout: Layout, frame: Frame, tensors: Tensors, departure: Departure
    ) -> None:
        """A program of the stream. What fails fails the message, not the stream."""
        edge, memory = self._edge, berth.buffer.memory
        try:
            pack(edge, layout, tensors, memory)
            heads(memory, 1).copy_(berth.words, non_blocking=True)
            if frame.description:
                memory[layout.nbytes : frame.nbytes].copy_(bytes_tensor(frame.description))
            self._settle_inputs()
            departure.sent(edge.communicator.isend(memory[: frame.first], edge.peer))
            if frame.nbytes > frame.first:
                departure.sent(edge.second.isend(memory[frame.first : frame.nbytes], edge.peer))
        except EquipoiseError as failure:
            departure.fail(failure)

    def _settle_inputs(self) -> None:
        """Where the communicator follows no stream, have the message packed before it is sent."""
        if not self._ordered:
            self._edge.stream.record(self._packed)
            self._packed.synchronize(self._edge.deadline)
