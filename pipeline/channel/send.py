"""The sending end of an edge: a ring of buffers that messages are packed into and sent from."""

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
from equipoise.pipeline.channel.gather import check_replicated
from equipoise.pipeline.channel.message import (
    HEADER_WORDS,
    Header,
    LayoutCache,
    MessageLayout,
    Tensors,
    check_in_place,
    check_matches_schema,
    message_layout,
    pack,
    typed_view,
)
from equipoise.pipeline.channel.schema import MessageSchema, TensorField


class SendHandle:
    """Handle of a sent message; it may be dropped.

    One stream program packs the message and another gives it to the communicator; both may run
    after `send` has returned. Their errors are raised here instead of failing the streams: losing
    a peer is no reason to stop computing.

    Args:
        sequence: of the message.
        packed: recorded after the program that packs the message.
        issued: recorded after the program that gives it to the communicator. It has been recorded
            once `packed` is reached, unless packing failed.
        deadline: seconds that `wait` waits for each of them.
    """

    def __init__(self, sequence: int, packed: Event, issued: Event, deadline: float) -> None:
        self.sequence = sequence
        self._packed = packed
        self._issued = issued
        self._deadline = deadline
        self._work: Work | None = None
        self._failure: EquipoiseError | None = None
        self._completed = False

    def set_work(self, work: Work) -> None:
        """Set what the communicator does with the message."""
        self._work = work

    def set_failure(self, failure: Exception) -> None:
        """Record that a program could not pack or issue the message; the first failure stays."""
        summary = f"message {self.sequence} could not be sent"
        self._failure = self._failure or as_equipoise_error(failure, summary)

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once."""
        if self._completed or self._failure is not None:
            return True
        # In this order: the events are reused, so `_issued` may stand for the message that the
        # buffer held before until `_packed` has been reached.
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
        if not self._completed:
            self._follow()
        if self._failure is not None:
            raise self._failure

    @property
    def has_failed(self) -> bool:
        """Whether sending is known to have failed."""
        return self._failure is not None

    def _has_left(self) -> bool:
        if self._failure is not None:
            return True
        return self._issued.query() and (self._work is None or self._work.done())

    def _follow(self) -> None:
        try:
            self._packed.synchronize(self._deadline)
            if self._failure is None:
                self._issued.synchronize(self._deadline)
        except StreamError as failure:
            self._failure = self._failure or failure
        self._end(self._deadline)

    def _end(self, timeout: float) -> None:
        """Collect the outcome. Drops the work, which may keep the buffer alive."""
        if self._work is not None:
            try:
                self._work.result(timeout)
            except CommunicatorError as failure:
                self._failure = self._failure or failure
        self._completed, self._work = True, None


class BorrowState(StrEnum):
    """Whether a caller has, or may have, tensors over a send buffer."""

    NONE = "none"
    OPEN = "open"
    """The tensors of the next message are lent out, to be written in place."""
    PAST = "past"
    """The tensors of the last message were lent out and may still exist."""


@dataclass(frozen=True)
class _Views:
    """Views of a message's header and tensors in a buffer.

    They are kept from message to message, since making them costs more than copying a few rows.
    """

    layout: MessageLayout
    head: Tensor
    parts: tuple[Tensor, ...]

    @staticmethod
    def of(layout: MessageLayout, memory: Tensor) -> "_Views":
        parts = tuple(field.sent_tensor(memory) for field in layout.fields)
        return _Views(layout, typed_view(memory, 0, (1, HEADER_WORDS), torch.int64), parts)

    @property
    def count(self) -> int:
        return 1 + len(self.parts)


class SendBuffer:
    """One buffer of a sending ring.

    ```text
    free --lend--> lent --send--> packing --> sending (SendHandle) --> free
      \\--------------send----------^
    ```

    Args:
        edge: that the ring belongs to.

    Attributes:
        buffer: the memory that messages are packed into.
        pack_done: recorded by the program that packs, after packing.
        packed, issued: the events of its `SendHandle`.
        last_send: handle of the last message; None before the first.
        borrow_state: whether tensors over the buffer are lent out.
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
        """Whether the last message has left the buffer and no caller keeps a tensor of it.

        Also true if the last message failed: then the next `send` raises that failure.
        """
        if self.last_send is None:
            return True
        return self.last_send.is_completed() and (self.last_send.has_failed or self.borrow_ended())

    def borrow_ended(self) -> bool:
        """Whether no caller keeps a tensor of the last message."""
        return self.borrow_state is not BorrowState.PAST or not self.buffer.in_use

    def reserve(self, nbytes: int) -> None:
        """Grow the buffer to `nbytes` if it is smaller."""
        if self.buffer.reserve(nbytes):
            self._views = None

    def lend_tensors(self, layout: MessageLayout) -> dict[str, Tensor]:
        """Return the tensors of the next message, in the buffer it is sent from, to be filled.

        Tensors of which only a slice travels are left out.
        """
        self.reserve(layout.nbytes)
        self.borrow_state = BorrowState.OPEN
        pairs = zip(layout.fields, self._views_of(layout).parts, strict=True)
        return {field.field.name: part.detach() for field, part in pairs if field.num_slices == 1}

    def mark_sent(self, handle: SendHandle) -> None:
        """Record the handle of the message that was just launched."""
        self.last_send = handle
        self.borrow_state = (
            BorrowState.PAST if self.borrow_state is BorrowState.OPEN else BorrowState.NONE
        )

    def write_header(self, header: Header) -> None:
        """Write the header of the next message into host memory; `pack` copies it."""
        header.write(self._header_bytes)

    def pack(self, layout: MessageLayout, tensors: Tensors) -> None:
        """Copy the header and the tensors into the buffer on the current stream, except for tensors
        that lie there already."""
        views = self._views_of(layout)
        views.head.copy_(self._header, non_blocking=True)
        pack(self._edge, layout, tensors, views.parts)

    def _views_of(self, layout: MessageLayout) -> _Views:
        """Return views for `layout`; they are replaced if the last message had another layout."""
        views = self._views
        if views is None or views.layout is not layout:
            self.buffer.add_owner_views(-views.count if views is not None else 0)
            views = self._views = _Views.of(layout, self.buffer.memory)
            self.buffer.add_owner_views(views.count)
        return views


class SendingEnd:
    """Packs and sends the tensors of a stage, one message per step.

    A program of the edge's stream packs the message into a buffer of the ring, so whatever is
    launched after it may overwrite the tensors. If the communicator does not follow streams, a
    program of the auxiliary stream issues the message, and computing goes on meanwhile. A buffer is
    reused once its message has left it, however long the receiver takes.

    Either the host sends, or programs of the stream do, but not both: a program that waits for a
    buffer would wait for the host, which waits for the program.

    Args:
        edge: of this end.
    """

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._layouts = LayoutCache(edge.num_slices)
        self._verified: set[tuple[TensorField, ...]] = set()
        self._buffers = [SendBuffer(edge) for _ in range(edge.depth)]
        ordered = edge.communicator.capabilities.stream_ordered
        self._issue_stream = edge.stream if ordered else edge.accelerator.stream(Role.AUX)
        # On the CPU a copy is complete when the program goes on; on a device the auxiliary stream
        # has to wait for it before the host issues the message.
        self._awaits_packing = not ordered and edge.accelerator.device.type != "cpu"
        self._release_waiter = ReleaseWaiter(edge)
        self._sequence = 0
        self._sending = threading.Lock()
        self._status = EdgeStatus(edge.name)

    def has_free_buffer(self) -> bool:
        """Whether `send` would find a free buffer without waiting."""
        return self._next().is_free()

    def reserve(self, schema: MessageSchema) -> None:
        """Allocate memory for messages of `schema`, the largest to come, so that none is allocated
        later."""
        with self._sending:
            nbytes = message_layout(schema, self._edge.num_slices).nbytes
            for buffer in self._buffers:
                if buffer.last_send is None and buffer.borrow_state is BorrowState.NONE:
                    buffer.reserve(nbytes)

    def borrow_outputs(self, schema: MessageSchema) -> dict[str, Tensor]:
        """Return the tensors of the next step in their send buffer, for `send` after filling.

        These are the tensors that travel whole; filled in place they need no packing. They must not
        be written after the `send`, and must be dropped before the ring reaches the buffer again.

        Waits for the buffer like `send`, and raises the same errors.
        """
        with self._sending:
            self._status.check_open()
            layout, buffer = self._layouts.lookup(schema), self._next()
            self._wait_until_free(buffer)
            return buffer.lend_tensors(layout)

    def send(self, tensors: Tensors, schema: MessageSchema) -> SendHandle:
        """Send the tensors of one step; from the host, or from a program of the edge's stream.

        Args:
            tensors: by name, on the edge's device; read in the order of the edge's stream.
            schema: of the step, the one that the receiver expects.

        Returns:
            The handle of the message. It need not be waited for: `send` waits for the message that
            used its buffer before, for the edge's deadline at most.

        Raises:
            ShapeClassError: the tensors do not match the schema or lie on another device; or some
                lie in the ring, but not where `borrow_outputs` put them.
            BuffersBusy: tensors that `borrow_outputs` lent for an earlier step still exist.
            CommunicatorFailed: an earlier message could not be sent.
            NotReplicated: a sliced tensor differs between ranks. Checked for the first message with
                these tensors, of whatever number of rows; it is then not sent. The check
                synchronizes the stream.
            ChannelClosed: the end was closed, or has failed before.
        """
        with self._sending:
            self._status.check_open()
            check_matches_schema(self._edge, schema, tensors)
            layout, buffer = self._layouts.lookup(schema), self._next()
            # `borrow_outputs` has waited for the buffer already.
            if buffer.borrow_state is not BorrowState.OPEN:
                self._wait_until_free(buffer)
            self._prepare(buffer, layout, tensors)
            return self._launch(buffer, layout, dict(tensors))

    def drain(self) -> None:
        """Wait until every message has left its buffer.

        Raises what `SendHandle.wait` raises, and the failure that closed this end, if any.
        """
        with self._sending:
            handles = [buffer.last_send for buffer in self._buffers]
        # Without the lock: a wait lasts up to the deadline, and another thread may send meanwhile.
        for handle in handles:
            if handle is not None:
                handle.wait()
        failure = self._status.failure
        if failure is not None and not isinstance(failure, ChannelClosed):
            raise failure

    def close(self) -> None:
        """Refuse further messages; those in flight go on, and keep their memory."""
        self._status.close()

    def _next(self) -> SendBuffer:
        return self._buffers[self._sequence % self._edge.depth]

    def _wait_until_free(self, buffer: SendBuffer) -> None:
        """Wait until the last message and the borrowed tensors have left `buffer`."""
        if buffer.last_send is not None:
            if not buffer.last_send.is_completed():
                self._edge.counters.add_host_wait()
            began = time.monotonic_ns()
            try:
                buffer.last_send.wait()
            except EquipoiseError as failure:
                self._status.fail(failure)
                raise
            self._edge.counters.add_message_wait(time.monotonic_ns() - began)
        if not buffer.borrow_ended():
            self._release_waiter.wait(buffer.borrow_ended, self._holder)

    def _holder(self) -> str:
        number = self._sequence - self._edge.depth
        return f"{self._edge.name}: tensors lent for message {number} are still referenced"

    def _prepare(self, buffer: SendBuffer, layout: MessageLayout, tensors: Tensors) -> None:
        """Do everything that may be refused, before anything is changed."""
        if buffer.borrow_state is BorrowState.OPEN:
            check_in_place(self._edge, layout, tensors, buffer.buffer.memory)
        buffer.reserve(layout.nbytes)  # `tensors` may be of a larger schema than was lent
        self._verify_slices(layout, tensors)

    def _verify_slices(self, layout: MessageLayout, tensors: Tensors) -> None:
        """Check that sliced tensors are equal on all sending ranks.

        Once per set of tensors, whatever their number of rows: the check is a collective that the
        host waits for, and steps of mixed sizes would do little else.
        """
        if not layout.sliced_fields or self._edge.slice_group is None:
            return
        tensor_set = layout.schema.without_rows
        if tensor_set not in self._verified:
            self._edge.counters.add_host_wait()
            self._edge.stream.synchronize(self._edge.deadline)
            check_replicated(self._edge, self._edge.slice_group, layout, tensors)
            self._verified.add(tensor_set)

    def _launch(
        self, buffer: SendBuffer, layout: MessageLayout, tensors: dict[str, Tensor]
    ) -> SendHandle:
        edge = self._edge
        handle = SendHandle(self._sequence, buffer.packed, buffer.issued, edge.deadline)
        program = partial(self._pack_and_send, buffer, layout, tensors, handle)
        try:
            buffer.write_header(Header(self._sequence, layout.schema.digest, layout.nbytes))
            edge.stream.launch(program)
            edge.stream.record(buffer.packed)
        except BaseException as failure:  # some of it may have been done
            self._status.fail(failure)
            raise
        self._sequence += 1
        # Only after `packed` has been recorded: a waiter would see the event of the message before.
        buffer.mark_sent(handle)
        edge.counters.add_message(layout.nbytes)
        return handle

    def _pack_and_send(
        self, buffer: SendBuffer, layout: MessageLayout, tensors: Tensors, handle: SendHandle
    ) -> None:
        """Runs as a program of the edge's stream. An error fails the message, not the stream."""
        try:
            buffer.pack(layout, tensors)
            self._issue_after_packing(buffer, layout.nbytes, handle)
        except Exception as failure:
            handle.set_failure(failure)

    def _issue_after_packing(self, buffer: SendBuffer, nbytes: int, handle: SendHandle) -> None:
        """Have the communicator get the message after packing."""
        if self._awaits_packing:
            self._edge.stream.record(buffer.pack_done)
        self._issue_stream.launch(partial(self._issue, buffer, nbytes, handle))
        self._issue_stream.record(buffer.issued)

    def _issue(self, buffer: SendBuffer, nbytes: int, handle: SendHandle) -> None:
        """Runs as a program of the issuing stream; errors as above."""
        edge = self._edge
        try:
            if self._awaits_packing:
                buffer.pack_done.synchronize(edge.deadline)
            handle.set_work(edge.communicator.isend(buffer.buffer.memory[:nbytes], edge.peer))
        except Exception as failure:
            handle.set_failure(failure)
