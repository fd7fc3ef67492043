"""The receiving end of an edge: receives posted ahead into a ring of buffers.

The schema of each message is known before it arrives (`expect`). A buffer is received into again
when no tensor refers to it and the readers' work is done.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from equipoise.hal.errors import ChannelError, EquipoiseError, MessageMismatch, StreamFailed
from equipoise.hal.stream import Event, Role, Stream
from equipoise.hal.work import Work
from equipoise.pipeline.channel.buffers import ReleaseWaiter, TrackedBuffer, host_headers
from equipoise.pipeline.channel.edge import Edge, EdgeStatus, ReadMode
from equipoise.pipeline.channel.gather import Completion, gather, gather_specs
from equipoise.pipeline.channel.message import (
    LayoutCache,
    MessageLayout,
    header_views,
    read_header,
    unpack,
)
from equipoise.pipeline.channel.schema import MessageSchema
from equipoise.pipeline.intermediate_tensors import AsyncIntermediateTensors


@dataclass(frozen=True)
class PendingMessage:
    """A message that was posted for and may not have arrived.

    Attributes:
        edge: that it arrives over.
        sequence: number of messages before it.
        layout: of the schema that is expected.
        completion: ends when all tensors have arrived.
        headers: returns the headers of all messages that the tensors are made of, int64
            [slices, 8]. A new view each time, since a view that is kept keeps the buffer in use.
    """

    edge: Edge
    sequence: int
    layout: MessageLayout
    completion: Completion
    headers: Callable[[], Tensor]

    def check_headers(self, headers: Sequence[Sequence[int]]) -> None:
        """Raise `MessageMismatch` unless these headers are those of the expected message.

        Takes numbers, not tensors: an exception keeps the local variables of its frames alive, and
        a tensor among them would keep the buffer in use.
        """
        name = f"{self.edge.name}, message {self.sequence}"
        for words in headers:
            header = read_header(words, name)
            if header.sequence != self.sequence:
                raise MessageMismatch(f"{name}: message {header.sequence} came in its place")
            if header.schema_digest != self.layout.schema.digest:
                raise MessageMismatch(f"{name}: it is not {self.layout.schema}")
            if header.nbytes != self.layout.nbytes:
                nbytes = self.layout.nbytes
                raise MessageMismatch(f"{name}: {header.nbytes} bytes instead of {nbytes}")

    def is_lost(self) -> bool:
        """Whether it has failed and will never arrive; its buffer may still be written to."""
        if not self.completion.done():
            return False
        try:
            self.completion.result(0.0)
        except EquipoiseError:
            return True
        return False

    def wait_on_host(self) -> None:
        """Block the host until all tensors have arrived. Raises `CommunicatorFailed`."""
        if not self.completion.done():
            self.edge.counters.add_host_wait()
        began = time.monotonic_ns()
        self.completion.result(self.edge.deadline)
        self.edge.counters.add_message_wait(time.monotonic_ns() - began)


class HostRecvHandle:
    """Handle of a message in host memory: `wait` blocks, and then any thread may read.

    Attributes:
        message: the message.
    """

    def __init__(self, message: PendingMessage) -> None:
        self.message = message
        self._checking = threading.Lock()
        self._checked = False

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self.message.completion.done()

    def wait(self) -> None:
        """Block until the tensors have arrived, and check that they are the expected ones.

        Raises:
            CommunicatorFailed: the message did not arrive by the deadline, or the sender is lost.
            MessageMismatch: another message arrived.
        """
        with self._checking:
            if self._checked:
                return
            self.message.wait_on_host()
            self.message.check_headers(self.message.headers().tolist())
            self._checked = True

    def can_verify(self) -> bool:
        """Whether `verify` would return or raise at once."""
        return self.message.completion.done()

    def verify(self) -> None:
        """Block the host until the message is complete and checked. Raises what `wait` raises."""
        self.wait()


class StreamRecvHandle:
    """Handle of a message in device memory: `wait` makes the edge's stream wait, not the host.

    The host cannot read a header in device memory without waiting for the device. So the stream
    copies it to host memory, overlapped with the forward pass, and `verify` checks it, at the
    latest before the buffer is reused.

    Args:
        message: the message.
        headers: int64 [slices, 8] in host memory, the destination of the headers.
        copied: recorded after that copy.
    """

    def __init__(self, message: PendingMessage, headers: Tensor, copied: Event) -> None:
        self.message = message
        self._headers = headers
        self._copied = copied
        self._ordering = threading.Lock()
        self._ordered = False

    def is_completed(self) -> bool:
        """Whether the tensors have arrived, or never will."""
        return self.message.completion.done()

    def wait(self) -> None:
        """Make the edge's stream wait for the message.

        Raises:
            StreamFailed: the edge's stream failed.
            CommunicatorFailed: the message is known to have failed.
        """
        with self._ordering:
            if not self._ordered:
                self.message.completion.wait(self.message.edge.stream)
                self._fetch_headers(self.message.edge.stream)

    def can_verify(self) -> bool:
        """Whether `verify` would return or raise at once; starts the header copy if needed."""
        if not self.message.completion.done():
            return False
        self._start_header_copy()
        return self._copied.query()

    def verify(self) -> None:
        """Block the host until the message has arrived, and check its headers.

        Raises:
            CommunicatorFailed: the message did not arrive by the deadline, or the sender is lost.
            StreamFailed: the edge's stream failed.
            MessageMismatch: another message arrived; discard what was computed from it.
        """
        self.message.wait_on_host()
        self._start_header_copy()
        if not self._copied.query():
            self.message.edge.counters.add_host_wait()
        self._copied.synchronize(self.message.edge.deadline)
        self.message.check_headers(self._headers.tolist())

    def _start_header_copy(self) -> None:
        """Copy the headers of a message that no reader has waited for.

        On the auxiliary stream, since the readers' stream may already wait for later messages.
        """
        with self._ordering:
            if not self._ordered:
                self._fetch_headers(self.message.edge.accelerator.stream(Role.AUX))

    def _fetch_headers(self, stream: Stream) -> None:
        stream.launch(self._copy)
        stream.record(self._copied)
        self._ordered = True

    def _copy(self) -> None:
        headers = self.message.headers()
        self._headers = self._headers[: headers.shape[0]]
        self._headers.copy_(headers, non_blocking=True)


RecvHandle = HostRecvHandle | StreamRecvHandle


@dataclass(frozen=True)
class Free:
    """No receive is posted, and the buffer has no reader."""


@dataclass(frozen=True)
class Posted:
    """A receive is posted; `receive` has not returned its message yet."""

    sequence: int
    layout: MessageLayout
    work: Work


@dataclass(frozen=True)
class Taken:
    """A caller has the message's tensors, or may still have some."""

    sequence: int
    handle: RecvHandle


@dataclass(frozen=True)
class Released:
    """The reader has released the message; tensors may still exist.

    `still_referenced`: some existed at the release, and may still be read.
    """

    sequence: int
    handle: RecvHandle
    still_referenced: bool


RecvBufferState = Free | Posted | Taken | Released


class RecvBuffer:
    """One buffer of a receiving ring.

    ```text
    Free --post--> Posted --take--> Taken --release--> Released
      ^                               |                    |
      +---- clear: no tensor left ----+--------------------+
    ```

    Args:
        edge: that the ring belongs to.

    Attributes:
        state: of its message.
        reads_done: recorded after the last read.
        allocated: recorded when memory was allocated; the first write has to wait for it.
        newly_allocated: whether memory was allocated that no write has waited for yet.
    """

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._message = TrackedBuffer(edge.allocate)
        self._gathered = TrackedBuffer(edge.allocate)
        self._headers = host_headers(edge.accelerator, edge.num_slices)
        self._copied = edge.accelerator.event()
        self.reads_done, self.allocated = edge.accelerator.event(), edge.accelerator.event()
        self.newly_allocated = False
        self.state: RecvBufferState = Free()
        self._lock = threading.RLock()

    @property
    def in_use(self) -> bool:
        """Whether tensors of a received message refer to the memory."""
        return self._message.in_use or self._gathered.in_use

    def reserve(self, layout: MessageLayout) -> Tensor:
        """Return memory for such a message, uint8 [layout.nbytes]; only in the state `Free`."""
        grown = [
            self._message.reserve(layout.nbytes),
            self._gathered.reserve(layout.gathered_nbytes),
        ]
        self.newly_allocated = self.newly_allocated or any(grown)
        return self._message.memory[: layout.nbytes]

    def post(self, sequence: int, layout: MessageLayout, work: Work) -> None:
        """Record that a receive into the buffer was posted."""
        self.state = Posted(sequence, layout, work)

    def take(self, rows: int | None) -> tuple[dict[str, Tensor], RecvHandle]:
        """Return the tensors of the posted message and its handle; begins the gathers.

        `rows` is as in `ReceivingEnd.take`.

        Raises:
            CommunicatorFailed: a gather cannot be issued.
        """
        posted = self.state
        assert isinstance(posted, Posted)
        handle = self._recv_handle(posted, self._completion(posted))
        self.state = Taken(posted.sequence, handle)
        tensors = unpack(posted.layout, self._message.memory, self._gathered.memory, rows)
        return tensors, handle

    def release(self) -> None:
        """Record that the reader has launched its last read on the edge's stream."""
        # A lease is released from any thread, also while `expect` clears the buffer.
        with self._lock:
            if isinstance(self.state, Taken):
                self._record_reads_done()
                self.state = Released(self.state.sequence, self.state.handle, self.in_use)

    def clear(self) -> None:
        """Make the buffer free: no tensor refers to it, and `reads_done` is after every read.

        A release that left tensors behind does not cover reads of these, so the event is recorded
        again. Where the host reads there is no event: host code holds a tensor while it reads.
        """
        with self._lock:
            if not isinstance(self.state, Released) or self.state.still_referenced:
                self._record_reads_done()
            self.state = Free()

    def _record_reads_done(self) -> None:
        """Record `reads_done` after every read launched so far, where streams read."""
        if self._edge.effective_read_mode is ReadMode.STREAM:
            with suppress(StreamFailed):  # whoever waits for `reads_done` gets the failure
                self._edge.stream.record(self.reads_done)

    def _completion(self, posted: Posted) -> Completion:
        slices, layout = self._edge.slice_group, posted.layout
        if slices is None or not layout.sliced_fields:
            return posted.work
        parts = gather_specs(layout, self._message.memory, self._gathered.memory)
        return gather(self._edge, slices, posted.work, parts)

    def _recv_handle(self, posted: Posted, completion: Completion) -> RecvHandle:
        headers = self._headers_of_slices if posted.layout.sliced_fields else self._header
        message = PendingMessage(self._edge, posted.sequence, posted.layout, completion, headers)
        if self._edge.effective_read_mode is ReadMode.HOST:
            return HostRecvHandle(message)
        return StreamRecvHandle(message, self._headers, self._copied)

    def _header(self) -> Tensor:
        return header_views(self._message.memory, 1)

    def _headers_of_slices(self) -> Tensor:
        return header_views(self._gathered.memory, self._edge.num_slices)


class _RecvBufferLease:
    """The lease of a received message; may be released from any thread, and more than once."""

    def __init__(self, buffer: RecvBuffer, readers: ReleaseWaiter) -> None:
        self._buffer = buffer
        self._readers = readers

    def release(self) -> None:
        """Declare that nothing launched from now on reads the tensors."""
        self._buffer.release()
        self._readers.notify()


class ReceivingEnd:
    """Posts receives ahead into a ring of buffers, and returns their messages in order.

    `expect` names the schema of a coming message and posts its receive; `receive` returns the
    tensors, which may still be on their way. A buffer is received into again when no tensor refers
    to it, and after the last read that is known: the one before `release`, or else whatever had
    been launched when the last tensor was dropped.

    Args:
        edge: of this end.
    """

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._layouts = LayoutCache(edge.num_slices)
        self._buffers = [RecvBuffer(edge) for _ in range(edge.depth)]
        self._expected_buffers: deque[RecvBuffer] = deque()
        self._ordered = edge.communicator.capabilities.stream_ordered
        self._comm = edge.accelerator.stream(Role.COMM)
        self._sequence = 0
        self._posting = threading.Lock()
        self._release_waiter = ReleaseWaiter(edge)
        self._status = EdgeStatus(edge.name)

    @property
    def num_expected(self) -> int:
        """Number of messages that are expected and have not been received."""
        return len(self._expected_buffers)

    def has_free_buffer(self) -> bool:
        """Whether `expect` would find a free buffer without waiting for its reader or message."""
        buffer = self._next()
        state = buffer.state
        if isinstance(state, Taken | Released):
            return self._reading_done(buffer) and state.handle.can_verify()
        return isinstance(state, Free)

    def reserve(self, schema: MessageSchema) -> None:
        """Allocate memory for messages of `schema`, the largest to come, so that none is allocated
        later."""
        with self._posting:
            layout = self._layouts.lookup(schema)
            for buffer in self._buffers:
                if isinstance(buffer.state, Free):
                    buffer.reserve(layout)
                    self._order_after_allocation(buffer)

    def expect(self, schema: MessageSchema) -> None:
        """Post the receive of one more step.

        Waits while the next buffer is still read, for the edge's deadline at most.

        Args:
            schema: of the step; the same that the sender uses.

        Raises:
            BuffersBusy: all buffers are still read, or hold messages that were not received.
            StreamFailed: the edge's stream failed, so its readers will not release a buffer.
            MessageMismatch: an earlier message was not the expected one.
            CommunicatorFailed: an earlier message did not arrive, or the receive cannot be posted.
            ChannelClosed: the end was closed, or has failed before.
        """
        with self._posting:
            self._status.check_open()
            buffer = self._next()
            self._await_readers(buffer)
            try:
                self._clear(buffer)
                self._post(buffer, self._layouts.lookup(schema))
            except BaseException as failure:  # some of it may have been done
                self._status.fail(failure)
                raise

    def receive(self) -> AsyncIntermediateTensors:
        """Return the tensors of the next step, which may still be on their way.

        Returns:
            A mapping with a lease: call `release()` after the last read, or drop it and all tensors
            read from it.

        Raises as `take`.
        """
        tensors, handle, buffer = self._take(None)
        return AsyncIntermediateTensors(
            tensors, [handle], lease=_RecvBufferLease(buffer, self._release_waiter)
        )

    def take(self, rows: int | None = None) -> tuple[dict[str, Tensor], RecvHandle]:
        """Return the tensors of the next step and the handle to wait for before reading them.

        Gathers of slices are issued here, in the order of these calls: ranks of one slice group
        have to receive their messages in one order. The buffer is free when no tensor is left.

        Args:
            rows: rows of the tensors, if more than those of the step; `Receiver.take` says what
                they hold.

        Raises:
            ChannelError: no message is expected.
            CommunicatorFailed: a gather cannot be issued.
        """
        tensors, handle, _ = self._take(rows)
        return tensors, handle

    def _take(self, rows: int | None) -> tuple[dict[str, Tensor], RecvHandle, RecvBuffer]:
        # Without `_posting`: `expect` holds it while it waits for a buffer, which only becomes free
        # once its message has been received.
        try:
            buffer = self._expected_buffers.popleft()
        except IndexError:
            raise ChannelError(f"{self._edge.name}: no message is expected") from None
        try:
            tensors, handle = buffer.take(rows)
        except BaseException as failure:
            self._status.fail(failure)
            raise
        return tensors, handle, buffer

    def is_drained(self) -> bool:
        """Whether `drain` would return or raise without waiting for a message."""
        states = [buffer.state for buffer in self._buffers]
        return all(s.handle.can_verify() for s in states if isinstance(s, Taken | Released))

    def drain(self) -> None:
        """Wait for every message that was received, and check its header.

        Raises what `expect` raises for earlier messages.
        """
        for buffer in self._buffers:
            if isinstance(buffer.state, Taken | Released):
                buffer.state.handle.verify()

    def close(self) -> None:
        """Refuse further messages; receives in flight keep their memory until they end."""
        self._status.close()

    def _next(self) -> RecvBuffer:
        return self._buffers[self._sequence % self._edge.depth]

    def _reading_done(self, buffer: RecvBuffer) -> bool:
        """Whether the buffer has no reader; also true if its message failed, which has none."""
        if not isinstance(buffer.state, Taken | Released):
            return False
        return not buffer.in_use or buffer.state.handle.message.is_lost()

    def _clear(self, buffer: RecvBuffer) -> None:
        """Check the message that the buffer held, and wait for its readers."""
        if isinstance(buffer.state, Taken | Released):
            # Before the buffer is free: the next message overwrites the header that is checked.
            buffer.state.handle.verify()
            buffer.clear()
            self._order_after(buffer.reads_done)

    def _order_after(self, freed: Event) -> None:
        """Make later receives wait for the last read of the device."""
        if self._edge.effective_read_mode is ReadMode.HOST:
            return
        if self._ordered:
            self._comm.wait(freed)
        else:
            if not freed.query():
                self._edge.counters.add_host_wait()
            freed.synchronize(self._edge.deadline)

    def _order_after_allocation(self, buffer: RecvBuffer) -> None:
        """Make receives wait for the allocation.

        New memory may have belonged to another tensor, which the edge's stream still reads.
        """
        if self._ordered and buffer.newly_allocated:
            self._edge.stream.record(buffer.allocated)
            self._comm.wait(buffer.allocated)
            buffer.newly_allocated = False

    def _await_readers(self, buffer: RecvBuffer) -> None:
        if not isinstance(buffer.state, Free):
            self._release_waiter.wait(
                partial(self._reading_done, buffer), partial(self._holder, buffer)
            )

    def _holder(self, buffer: RecvBuffer) -> str:
        """Describe why the next buffer is not free."""
        state, name = buffer.state, self._edge.name
        if isinstance(state, Posted):
            return f"{name}: message {state.sequence} was not received"
        assert isinstance(state, Taken | Released)
        return (
            f"{name}: tensors of message {state.sequence} are still referenced "
            f"{self._edge.deadline:g} s later, and all {self._edge.depth} buffers are in use"
        )

    def _post(self, buffer: RecvBuffer, layout: MessageLayout) -> None:
        memory = buffer.reserve(layout)
        self._order_after_allocation(buffer)
        current: AbstractContextManager[None] = nullcontext()
        if self._ordered:
            current = self._comm.current()
        with current:
            work = self._edge.communicator.irecv(memory, self._edge.peer)
        buffer.post(self._sequence, layout, work)
        self._sequence += 1
        self._edge.counters.add_message(layout.nbytes)
        self._expected_buffers.append(buffer)
