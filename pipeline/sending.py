"""The end of an edge that sends."""

import threading
import time
from functools import partial

from torch import Tensor

from equipoise.hal.errors import ChannelClosed, EquipoiseError
from equipoise.hal.stream import Role
from equipoise.pipeline.departure import Departure
from equipoise.pipeline.edge import Edge
from equipoise.pipeline.failures import Standing
from equipoise.pipeline.framing import Announced, Frame, Framing
from equipoise.pipeline.header import Header
from equipoise.pipeline.layout import Layout, layout_of
from equipoise.pipeline.layouts import Layouts, Met
from equipoise.pipeline.packing import Tensors, bytes_tensor, check_fits, check_in_place
from equipoise.pipeline.readers import Readers
from equipoise.pipeline.replicas import check_replicated
from equipoise.pipeline.sending_berth import Loan, SendingBerth
from equipoise.pipeline.shape_class import ShapeClass


class SendingEnd:
    """Packs what a stage made and sends it, one message a step.

    A message is packed by a program of the stage's stream into a buffer of the ring: what is
    launched behind it may overwrite the tensors at once. Where the communicator follows no stream,
    the auxiliary one hands the message to it, and computing goes on meanwhile. The buffer is used
    again when its message has left it, however long the receiver takes.

    Either the host sends, or programs of the stream do: a program that waits for a buffer would
    wait for the host, which waits for the program.

    Args:
        edge: whose end this is.
        framing: of its messages; one part and no description where the receiver is told.
    """

    def __init__(self, edge: Edge, framing: Framing | None = None) -> None:
        self._edge = edge
        self._framing = framing or Announced()
        self._layouts = Layouts(edge.parts, edge.meter)
        self._berths = [SendingBerth(edge) for _ in range(edge.depth)]
        ordered = edge.communicator.capabilities.stream_ordered
        self._issues = edge.stream if ordered else edge.accelerator.stream(Role.AUX)
        # In the host's memory what a program has copied is there when its next line runs.
        self._awaits_packing = not ordered and edge.accelerator.device.type != "cpu"
        self._readers = Readers(edge)
        self._sequence = 0
        self._sending = threading.Lock()
        self._standing = Standing(edge.name)

    def room(self) -> bool:
        """Whether `send` would find a free buffer without waiting."""
        return self._next().free()

    def reserve(self, shape_class: ShapeClass) -> None:
        """Have memory for the largest class that is to come, so that none is made later on."""
        with self._sending:
            nbytes = layout_of(shape_class, self._edge.parts).nbytes
            for berth in self._berths:
                if berth.departure is None and berth.loan is Loan.NONE:
                    berth.make_room(nbytes)

    def outgoing(self, shape_class: ShapeClass) -> dict[str, Tensor]:
        """The next step's tensors, where they are sent from: to be written, and given to `send`.

        Those that travel whole; written there they need not be packed. They are not to be written
        behind the `send`, and let go of before the ring comes round to them.

        Waits as `send` does, and raises what it raises of buffers.
        """
        with self._sending:
            self._standing.refuse_closed()
            met, berth = self._layouts.of(shape_class), self._next()
            self._make_free(berth)
            return berth.lend(met.layout, self._framing.frame(met).extent)

    def send(self, tensors: Tensors, shape_class: ShapeClass) -> Departure:
        """Hand over one step; from the host, or from a program of the edge's stream.

        Args:
            tensors: by name, on the edge's device; read in the order of the edge's stream.
            shape_class: of the step, as the receiver expects it.

        Returns:
            The handle of the message. Nobody need wait for it: `send` itself waits where its
            buffer is still sent from, for the edge's deadline at most.

        Raises:
            ShapeClassError: these are not tensors of that class, on the edge's device; or some lie
                in the ring, but not where `outgoing` has put this class's.
            BuffersHeld: somebody has kept tensors that `outgoing` lent for an earlier step.
            CommunicatorFailed: an earlier message could not be sent.
            NotReplicated: a sliced tensor differs between ranks (looked at in the first message
                of each class, which is then not sent; that takes a stop of the stream).
            ChannelClosed: the end was closed, or has failed before.
        """
        with self._sending:
            self._standing.refuse_closed()
            check_fits(self._edge, shape_class, tensors)
            met, berth = self._layouts.of(shape_class), self._next()
            if berth.loan is not Loan.OPEN:
                self._make_free(berth)
            frame = self._prepare(berth, met, tensors)
            return self._launch(berth, met, frame, dict(tensors))

    def drain(self) -> None:
        """Wait until every message that was handed over has left its buffer.

        Raises what `Departure.wait` raises, and what has ended this end before.
        """
        with self._sending:
            departures = [berth.departure for berth in self._berths]
        for departure in departures:
            if departure is not None:
                departure.wait()
        failure = self._standing.failure
        if failure is not None and not isinstance(failure, ChannelClosed):
            raise failure

    def close(self) -> None:
        """Refuse what comes from now on; what is on its way goes on, in memory that it keeps."""
        self._standing.close()

    def _next(self) -> SendingBerth:
        return self._berths[self._sequence % self._edge.depth]

    def _make_free(self, berth: SendingBerth) -> None:
        """The next buffer, for the next message."""
        if berth.departure is not None:
            began = time.monotonic_ns()
            try:
                berth.departure.wait()
            except EquipoiseError as failure:
                self._standing.fail(failure)
                raise
            self._edge.meter.waited(time.monotonic_ns() - began)
        if not berth.returned():
            self._readers.wait(berth.returned, self._holder)

    def _holder(self) -> str:
        number = self._sequence - self._edge.depth
        return f"{self._edge.name}: tensors lent for message {number} are still referred to"

    def _prepare(self, berth: SendingBerth, met: Met, tensors: Tensors) -> Frame:
        """Everything that may be refused; nothing has happened if it is."""
        frame = self._framing.frame(met)
        if berth.loan is Loan.OPEN:
            check_in_place(self._edge, met.layout, tensors, berth.buffer.memory)
        berth.make_room(frame.extent)  # other than what was lent may be larger
        if met.first:
            self._compare(met.layout, tensors)
        return frame

    def _compare(self, layout: Layout, tensors: Tensors) -> None:
        """Sliced tensors of a class that is new are what the other ranks have."""
        if layout.sliced and self._edge.slices is not None:
            self._edge.stream.synchronize(self._edge.deadline)
            check_replicated(self._edge, self._edge.slices, layout, tensors)

    def _launch(self, berth: SendingBerth, met: Met, frame: Frame, tensors: Tensors) -> Departure:
        edge = self._edge
        departure = Departure(self._sequence, berth.packed, berth.issued, edge.deadline)
        digest, described = met.layout.shape_class.digest, len(frame.description)
        header = Header(self._sequence, digest, frame.nbytes, frame.first, described)
        leave = partial(self._leave, berth, met.layout, frame, tensors, departure)
        try:
            self._layouts.meet(met)
            self._framing.framed(frame)
            berth.announce(header)
            edge.stream.launch(leave)
            edge.stream.record(berth.packed)
        except BaseException as failure:  # half of it may have happened
            self._standing.fail(failure)
            raise
        self._sequence += 1
        berth.leave(departure)  # not before: who waits for it waits for what is recorded last
        edge.meter.message(frame.extent, described=described, parts=frame.parts)
        return departure

    def _leave(
        self,
        berth: SendingBerth,
        layout: Layout,
        frame: Frame,
        tensors: Tensors,
        departure: Departure,
    ) -> None:
        """A program of the stream. What fails fails the message, not the stream."""
        try:
            berth.fill(layout, tensors)
            if frame.description:
                described = berth.buffer.memory[layout.nbytes : frame.nbytes]
                described.copy_(bytes_tensor(frame.description))
            self._pass_on(berth, frame, departure)
        except Exception as failure:
            departure.fail(failure)

    def _pass_on(self, berth: SendingBerth, frame: Frame, departure: Departure) -> None:
        """To the communicator, behind the packing."""
        if self._awaits_packing:
            self._edge.stream.record(berth.filled)
        self._issues.launch(partial(self._issue, berth, frame, departure))
        self._issues.record(berth.issued)

    def _issue(self, berth: SendingBerth, frame: Frame, departure: Departure) -> None:
        """A program, as above."""
        edge, memory = self._edge, berth.buffer.memory
        try:
            if self._awaits_packing:
                berth.filled.synchronize(edge.deadline)
            departure.sent(edge.communicator.isend(memory[: frame.first], edge.peer))
            if frame.nbytes > frame.first:
                departure.sent(edge.second.isend(memory[frame.first : frame.nbytes], edge.peer))
        except Exception as failure:
            departure.fail(failure)
