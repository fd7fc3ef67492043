"""A message on its way out.

One place of a sending ring: a buffer, and the message that leaves it.

The end of an edge that sends.
"""

import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import torch
from torch import Tensor

from equipoise.hal.errors import ChannelClosed, CommunicatorError, EquipoiseError, StreamError
from equipoise.hal.stream import Event, Role
from equipoise.hal.work import Work
from equipoise.pipeline.channel.buffers import ReleaseWaiter, TrackedBuffer, host_headers
from equipoise.pipeline.channel.edge import Edge, EdgeStatus, as_equipoise_error
from equipoise.pipeline.channel.framing import Frame, Framing, SinglePartFraming
from equipoise.pipeline.channel.gather import check_replicated
from equipoise.pipeline.channel.message import (
    HEADER_WORDS,
    CachedLayout,
    Header,
    LayoutCache,
    MessageLayout,
    Tensors,
    bytes_to_tensor,
    check_in_place,
    check_matches_schema,
    message_layout,
    pack,
    typed_view,
)
from equipoise.pipeline.channel.schema import MessageSchema


class SendHandle:
    """The handle of a sent message; dropping it changes nothing.

    The message is packed by a program of the stream, and handed to the communicator by one of
    another; both may run later than the call that asked for it. What fails there is raised here,
    so that the streams go on: a lost peer is no reason to stop computing.

    Args:
        sequence: of the message.
        packed: recorded behind the program that packs it.
        issued: recorded behind the one that hands it to the communicator; by the time that
            `packed` is reached, unless the packing has failed.
        deadline: seconds that `wait` waits for each.
    """

    def __init__(self, sequence: int, packed: Event, issued: Event, deadline: float) -> None:
        self.sequence = sequence
        self._packed = packed
        self._issued = issued
        self._deadline = deadline
        self._works: tuple[Work, ...] = ()
        self._failure: EquipoiseError | None = None
        self._over = False

    def add_work(self, work: Work) -> None:
        """The communicator has one more part of the message."""
        self._works += (work,)

    def set_failure(self, failure: Exception) -> None:
        """A program could not do its part."""
        what = f"message {self.sequence} could not be handed over"
        self._failure = self._failure or as_equipoise_error(failure, what)

    def is_completed(self) -> bool:
        """Whether `wait` would come back, or raise, at once."""
        if self._over or self._failure is not None:
            return True
        # In this order: before its packing has ended the event may stand for an older message.
        if not self._packed.query() or not self._has_left():
            return False
        self._end(0.0)
        return True

    def wait(self) -> None:
        """Block the host until the message has left its buffer.

        Raises:
            CommunicatorFailed: it could not be sent.
            StreamFailed: the stream failed before it was packed.
            StreamTimeout: it was not packed by the deadline.
            ChannelError: something else failed in a program.
        """
        if not self._over:
            self._follow()
        if self._failure is not None:
            raise self._failure

    @property
    def has_failed(self) -> bool:
        """Whether it could not be sent, as far as is known."""
        return self._failure is not None

    def _has_left(self) -> bool:
        if self._failure is not None:
            return True
        return self._issued.query() and all(work.done() for work in self._works)

    def _follow(self) -> None:
        try:
            self._packed.synchronize(self._deadline)
            if self._failure is None:
                self._issued.synchronize(self._deadline)
        except StreamError as failure:
            self._failure = self._failure or failure
        self._end(self._deadline)

    def _end(self, timeout: float) -> None:
        """Hear of every part how it went, and let go of them: they may keep the buffer."""
        for work in self._works:
            try:
                work.result(timeout)
            except CommunicatorError as failure:
                self._failure = self._failure or failure
        self._over, self._works = True, ()


class BorrowState(StrEnum):
    """Whether somebody outside has, or may have, tensors over a buffer that is sent from."""

    NONE = "none"
    OPEN = "open"
    """The next message's were handed out, to be written in place."""
    PAST = "past"
    """Those of the last message were, and may still be about."""


@dataclass(frozen=True)
class _Views:
    """Where a message's header and tensors lie in a buffer; to look that up costs more than to
    copy a few rows."""

    layout: MessageLayout
    head: Tensor
    parts: tuple[Tensor, ...]

    @staticmethod
    def of(layout: MessageLayout, memory: Tensor) -> "_Views":
        parts = tuple(place.sent_tensor(memory) for place in layout.fields)
        return _Views(layout, typed_view(memory, 0, (1, HEADER_WORDS), torch.int64), parts)

    @property
    def count(self) -> int:
        return 1 + len(self.parts)


class SendBuffer:
    """A buffer of a sending ring.

    ```text
    free --lend--> lent --send--> packing --> leaving (Departure) --> free
      \\--------------send----------^
    ```

    Args:
        edge: whose ring it is.

    Attributes:
        buffer: where the message is made.
        pack_done: recorded within the program that packs, behind the packing.
        packed, issued: events of its `SendHandle`.
        last_send: of the last message; None before the first.
        borrow_state: whether tensors over the buffer were handed out.
    """

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self.buffer = TrackedBuffer(edge.allocate)
        self._header = host_headers(edge.accelerator)
        self._header_bytes = self._header.numpy().data
        self.pack_done = edge.accelerator.event()
        self.packed, self.issued = edge.accelerator.event(), edge.accelerator.event()
        self.last_send: SendHandle | None = None
        self.borrow_state = BorrowState.NONE
        self._views: _Views | None = None

    def is_free(self) -> bool:
        """Whether the last message has left the buffer, and nobody keeps a tensor of it; or it
        never will, which whoever sends hears."""
        if self.last_send is None:
            return True
        return self.last_send.is_completed() and (self.last_send.has_failed or self.borrow_ended())

    def borrow_ended(self) -> bool:
        """Whether nobody keeps a tensor of the last message."""
        return self.borrow_state is not BorrowState.PAST or not self.buffer.in_use

    def reserve(self, nbytes: int) -> None:
        """Have at least so many bytes."""
        if self.buffer.reserve(nbytes):
            self._views = None

    def lend_tensors(self, layout: MessageLayout, nbytes: int) -> dict[str, Tensor]:
        """The tensors of the next message, of `nbytes`, where they will be sent from and of no
        particular content; not those of which only a slice travels."""
        self.reserve(nbytes)
        self.borrow_state = BorrowState.OPEN
        pairs = zip(layout.fields, self._views_of(layout).parts, strict=True)
        return {place.field.name: part.detach() for place, part in pairs if place.num_slices == 1}

    def mark_sent(self, departure: SendHandle) -> None:
        """The next message is on its way."""
        self.last_send = departure
        self.borrow_state = (
            BorrowState.PAST if self.borrow_state is BorrowState.OPEN else BorrowState.NONE
        )

    def write_header(self, header: Header) -> None:
        """Which message comes next."""
        header.write(self._header_bytes)

    def pack(self, layout: MessageLayout, tensors: Tensors) -> None:
        """The header, and every tensor that is not there already; in the current stream's order."""
        views = self._views_of(layout)
        views.head.copy_(self._header, non_blocking=True)
        pack(self._edge, layout, tensors, views.parts)

    def _views_of(self, layout: MessageLayout) -> _Views:
        """Made anew where the last message was of another class."""
        views = self._views
        if views is None or views.layout is not layout:
            self.buffer.add_owner_views(-views.count if views is not None else 0)
            views = self._views = _Views.of(layout, self.buffer.memory)
            self.buffer.add_owner_views(views.count)
        return views


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
        self._framing = framing or SinglePartFraming()
        self._layouts = LayoutCache(edge.num_slices, edge.counters)
        self._buffers = [SendBuffer(edge) for _ in range(edge.depth)]
        ordered = edge.communicator.capabilities.stream_ordered
        self._issue_stream = edge.stream if ordered else edge.accelerator.stream(Role.AUX)
        # In the host's memory what a program has copied is there when its next line runs.
        self._awaits_packing = not ordered and edge.accelerator.device.type != "cpu"
        self._release_waiter = ReleaseWaiter(edge)
        self._sequence = 0
        self._sending = threading.Lock()
        self._status = EdgeStatus(edge.name)

    def has_free_buffer(self) -> bool:
        """Whether `send` would find a free buffer without waiting."""
        return self._next().is_free()

    def reserve(self, shape_class: MessageSchema) -> None:
        """Have memory for the largest class that is to come, so that none is made later on."""
        with self._sending:
            nbytes = message_layout(shape_class, self._edge.num_slices).nbytes
            for berth in self._buffers:
                if berth.last_send is None and berth.borrow_state is BorrowState.NONE:
                    berth.reserve(nbytes)

    def borrow_outputs(self, shape_class: MessageSchema) -> dict[str, Tensor]:
        """The next step's tensors, where they are sent from: to be written, and given to `send`.

        Those that travel whole; written there they need not be packed. They are not to be written
        behind the `send`, and let go of before the ring comes round to them.

        Waits as `send` does, and raises what it raises of buffers.
        """
        with self._sending:
            self._status.check_open()
            met, berth = self._layouts.lookup(shape_class), self._next()
            self._wait_until_free(berth)
            return berth.lend_tensors(met.layout, self._framing.frame(met).padded_nbytes)

    def send(self, tensors: Tensors, shape_class: MessageSchema) -> SendHandle:
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
            self._status.check_open()
            check_matches_schema(self._edge, shape_class, tensors)
            met, berth = self._layouts.lookup(shape_class), self._next()
            if berth.borrow_state is not BorrowState.OPEN:
                self._wait_until_free(berth)
            frame = self._prepare(berth, met, tensors)
            return self._launch(berth, met, frame, dict(tensors))

    def drain(self) -> None:
        """Wait until every message that was handed over has left its buffer.

        Raises what `SendHandle.wait` raises, and what has ended this end before.
        """
        with self._sending:
            departures = [berth.last_send for berth in self._buffers]
        for departure in departures:
            if departure is not None:
                departure.wait()
        failure = self._status.failure
        if failure is not None and not isinstance(failure, ChannelClosed):
            raise failure

    def close(self) -> None:
        """Refuse what comes from now on; what is on its way goes on, in memory that it keeps."""
        self._status.close()

    def _next(self) -> SendBuffer:
        return self._buffers[self._sequence % self._edge.depth]

    def _wait_until_free(self, berth: SendBuffer) -> None:
        """The next buffer, for the next message."""
        if berth.last_send is not None:
            began = time.monotonic_ns()
            try:
                berth.last_send.wait()
            except EquipoiseError as failure:
                self._status.fail(failure)
                raise
            self._edge.counters.add_message_wait(time.monotonic_ns() - began)
        if not berth.borrow_ended():
            self._release_waiter.wait(berth.borrow_ended, self._holder)

    def _holder(self) -> str:
        number = self._sequence - self._edge.depth
        return f"{self._edge.name}: tensors lent for message {number} are still referred to"

    def _prepare(self, berth: SendBuffer, met: CachedLayout, tensors: Tensors) -> Frame:
        """Everything that may be refused; nothing has happened if it is."""
        frame = self._framing.frame(met)
        if berth.borrow_state is BorrowState.OPEN:
            check_in_place(self._edge, met.layout, tensors, berth.buffer.memory)
        berth.reserve(frame.padded_nbytes)  # other than what was lent may be larger
        if met.is_new:
            self._verify_slices(met.layout, tensors)
        return frame

    def _verify_slices(self, layout: MessageLayout, tensors: Tensors) -> None:
        """Sliced tensors of a class that is new are what the other ranks have."""
        if layout.sliced_fields and self._edge.slice_group is not None:
            self._edge.stream.synchronize(self._edge.deadline)
            check_replicated(self._edge, self._edge.slice_group, layout, tensors)

    def _launch(
        self, berth: SendBuffer, met: CachedLayout, frame: Frame, tensors: Tensors
    ) -> SendHandle:
        edge = self._edge
        departure = SendHandle(self._sequence, berth.packed, berth.issued, edge.deadline)
        digest, described = met.layout.schema.digest, len(frame.description)
        header = Header(self._sequence, digest, frame.nbytes, frame.first_part_bytes, described)
        leave = partial(self._pack_and_send, berth, met.layout, frame, tensors, departure)
        try:
            self._layouts.remember(met)
            self._framing.advance(frame)
            berth.write_header(header)
            edge.stream.launch(leave)
            edge.stream.record(berth.packed)
        except BaseException as failure:  # half of it may have happened
            self._status.fail(failure)
            raise
        self._sequence += 1
        berth.mark_sent(departure)  # not before: who waits for it waits for what is recorded last
        edge.counters.add_message(frame.padded_nbytes, described=described, parts=frame.num_parts)
        return departure

    def _pack_and_send(
        self,
        berth: SendBuffer,
        layout: MessageLayout,
        frame: Frame,
        tensors: Tensors,
        departure: SendHandle,
    ) -> None:
        """A program of the stream. What fails fails the message, not the stream."""
        try:
            berth.pack(layout, tensors)
            if frame.description:
                described = berth.buffer.memory[layout.nbytes : frame.nbytes]
                described.copy_(bytes_to_tensor(frame.description))
            self._issue_after_packing(berth, frame, departure)
        except Exception as failure:
            departure.set_failure(failure)

    def _issue_after_packing(self, berth: SendBuffer, frame: Frame, departure: SendHandle) -> None:
        """To the communicator, behind the packing."""
        if self._awaits_packing:
            self._edge.stream.record(berth.pack_done)
        self._issue_stream.launch(partial(self._issue, berth, frame, departure))
        self._issue_stream.record(berth.issued)

    def _issue(self, berth: SendBuffer, frame: Frame, departure: SendHandle) -> None:
        """A program, as above."""
        edge, memory = self._edge, berth.buffer.memory
        try:
            if self._awaits_packing:
                berth.pack_done.synchronize(edge.deadline)
            departure.add_work(edge.communicator.isend(memory[: frame.first_part_bytes], edge.peer))
            if frame.nbytes > frame.first_part_bytes:
                departure.add_work(
                    edge.require_second.isend(
                        memory[frame.first_part_bytes : frame.nbytes], edge.peer
                    )
                )
        except Exception as failure:
            departure.set_failure(failure)
