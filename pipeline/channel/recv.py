"""A message on its way in.

One place of a receiving ring: a buffer, and the message that comes into it.

The end of an edge that receives.
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
    CachedLayout,
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
    """What is to come.

    Attributes:
        edge: over which it comes.
        sequence: messages before it.
        layout: of the class that is expected.
        completion: ends when all tensors are there.
        headers: where the headers come of all messages that the tensors are made from: int64
            [slices, 8]; a fresh view, since whoever keeps one keeps the buffer from being used.
    """

    edge: Edge
    sequence: int
    layout: MessageLayout
    completion: Completion
    headers: Callable[[], Tensor]

    def check_headers(self, headers: Sequence[Sequence[int]]) -> None:
        """Raise `MessageMismatch` unless these announce what is expected.

        Numbers, since an error keeps what was at hand where it was raised: a tensor would keep the
        buffer.
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
        """Whether it has failed: it will never come, though its buffer may still be written to."""
        if not self.completion.done():
            return False
        try:
            self.completion.result(0.0)
        except EquipoiseError:
            return True
        return False

    def wait_on_host(self) -> None:
        """Block the host until all tensors are there. Raises `CommunicatorFailed`."""
        began = time.monotonic_ns()
        self.completion.result(self.edge.deadline)
        self.edge.counters.add_message_wait(time.monotonic_ns() - began)


class HostRecvHandle:
    """A message into the host's memory: whoever waits blocks, and may read anywhere behind it.

    Attributes:
        message: what is to come.
    """

    def __init__(self, awaited: PendingMessage) -> None:
        self.message = awaited
        self._checking = threading.Lock()
        self._checked = False

    def is_completed(self) -> bool:
        """Whether `wait` would come back, or raise, at once."""
        return self.message.completion.done()

    def wait(self) -> None:
        """Block until the tensors are there, and are the ones that are expected.

        Raises:
            CommunicatorFailed: the message did not come by the deadline, or its sender is gone.
            MessageMismatch: another message came.
        """
        with self._checking:
            if self._checked:
                return
            self.message.wait_on_host()
            self.message.check_headers(self.message.headers().tolist())
            self._checked = True

    def can_verify(self) -> bool:
        """Whether `settle` would come back, or raise, at once."""
        return self.message.completion.done()

    def verify(self) -> None:
        """Block the host until nothing of the message is to come. Raises what `wait` raises."""
        self.wait()


class StreamRecvHandle:
    """A message that whoever waits orders the edge's stream behind; the host goes on.

    The host cannot look at a header in a device's memory without stopping for the device. So the
    stream copies it to the host's memory beside the forward, and `settle` looks at it, at the
    latest before the buffer is used again.

    Args:
        message: what is to come.
        words: int64 [slices, 8] of the host, where the headers are copied to.
        copied: recorded behind that copy.
    """

    def __init__(self, awaited: PendingMessage, words: Tensor, copied: Event) -> None:
        self.message = awaited
        self._headers = words
        self._copied = copied
        self._ordering = threading.Lock()
        self._ordered = False

    def is_completed(self) -> bool:
        """Whether the tensors are there, or never will be."""
        return self.message.completion.done()

    def wait(self) -> None:
        """Order the edge's stream behind the message.

        Raises:
            StreamFailed: the edge's stream failed.
            CommunicatorFailed: the message is known to have failed.
        """
        with self._ordering:
            if not self._ordered:
                self.message.completion.wait(self.message.edge.stream)
                self._fetch_headers(self.message.edge.stream)

    def can_verify(self) -> bool:
        """Whether `settle` would come back, or raise, at once; begins to find out."""
        if not self.message.completion.done():
            return False
        self._start_header_copy()
        return self._copied.query()

    def verify(self) -> None:
        """Block the host until the message has come, and look at its headers.

        Raises:
            CommunicatorFailed: the message did not come by the deadline, or its sender is gone.
            StreamFailed: the edge's stream failed.
            MessageMismatch: another message came: what was computed from it is to be discarded.
        """
        self.message.wait_on_host()
        self._start_header_copy()
        self._copied.synchronize(self.message.edge.deadline)
        self.message.check_headers(self._headers.tolist())

    def _start_header_copy(self) -> None:
        """Fetch the headers of a message that no reader has waited for: on a stream of their own,
        since the readers' may be behind later messages by now."""
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
    """Nothing is to come, and nobody reads."""


@dataclass(frozen=True)
class Posted:
    """A receive is posted, and nobody has taken its message."""

    sequence: int
    layout: MessageLayout
    work: Work


@dataclass(frozen=True)
class Taken:
    """Somebody has the message's tensors, or may still have some."""

    sequence: int
    handle: RecvHandle


@dataclass(frozen=True)
class Released:
    """The reader has launched its last read, it says; tensors may still be about.

    `kept`: some were, when it said so, and may be read once more.
    """

    sequence: int
    handle: RecvHandle
    still_referenced: bool


RecvBufferState = Free | Posted | Taken | Released


class RecvBuffer:
    """A buffer of a receiving ring.

    ```text
    Free --post--> Posted --take--> Taken --release--> Released
      ^                               |                    |
      +---- clear: no tensor left ----+--------------------+
    ```

    Args:
        edge: whose ring it is.

    Attributes:
        state: of its message.
        reads_done: recorded behind the last read.
        allocated: for whoever writes into fresh memory to come behind.
        newly_allocated: whether memory was made that nothing has come behind yet.
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
        self._changing = threading.RLock()

    @property
    def in_use(self) -> bool:
        """Whether there are tensors over the memory that somebody has taken."""
        return self._message.in_use or self._gathered.in_use

    def reserve(self, layout: MessageLayout) -> Tensor:
        """Where such a message comes, uint8 [layout.nbytes]; only while the berth is free."""
        grown = [
            self._message.reserve(layout.nbytes),
            self._gathered.reserve(layout.gathered_nbytes),
        ]
        self.newly_allocated = self.newly_allocated or any(grown)
        return self._message.memory[: layout.nbytes]

    def post(self, sequence: int, layout: MessageLayout, work: Work) -> None:
        """A receive into `memory` was posted."""
        self.state = Posted(sequence, layout, work)

    def take(self) -> tuple[dict[str, Tensor], RecvHandle]:
        """The tensors of the message that is posted, on their way; gathers begin.

        Raises:
            CommunicatorFailed: a gather cannot be issued.
        """
        posted = self.state
        assert isinstance(posted, Posted)
        arrival = self._recv_handle(posted, self._completion(posted))
        self.state = Taken(posted.sequence, arrival)
        return unpack(posted.layout, self._message.memory, self._gathered.memory), arrival

    def release(self) -> None:
        """The reader has launched its last read on the edge's stream."""
        with self._changing:
            if isinstance(self.state, Taken):
                self._record_reads_done()
                self.state = Released(self.state.sequence, self.state.handle, self.in_use)

    def clear(self) -> None:
        """Nobody holds a tensor any more: whoever waits for `freed` comes behind every read.

        (Where the host reads there is no such event: what reads holds what it reads.)
        """
        with self._changing:
            if not isinstance(self.state, Released) or self.state.still_referenced:
                self._record_reads_done()
            self.state = Free()

    def _record_reads_done(self) -> None:
        """`freed` is behind every read that was launched by now, where streams read."""
        if self._edge.effective_read_mode is ReadMode.STREAM:
            with suppress(StreamFailed):  # which whoever waits for `freed` hears
                self._edge.stream.record(self.reads_done)

    def _completion(self, posted: Posted) -> Completion:
        slices, layout = self._edge.slice_group, posted.layout
        if slices is None or not layout.sliced_fields:
            return posted.work
        parts = gather_specs(layout, self._message.memory, self._gathered.memory)
        return gather(self._edge, slices, posted.work, parts)

    def _recv_handle(self, posted: Posted, whole: Completion) -> RecvHandle:
        headers = self._headers_of_slices if posted.layout.sliced_fields else self._header
        awaited = PendingMessage(self._edge, posted.sequence, posted.layout, whole, headers)
        if self._edge.effective_read_mode is ReadMode.HOST:
            return HostRecvHandle(awaited)
        return StreamRecvHandle(awaited, self._headers, self._copied)

    def _header(self) -> Tensor:
        return header_views(self._message.memory, 1)

    def _headers_of_slices(self) -> Tensor:
        return header_views(self._gathered.memory, self._edge.num_slices)


class _RecvBufferLease:
    """Ends with the reader's word; may be said from any thread, and more than once."""

    def __init__(self, berth: RecvBuffer, readers: ReleaseWaiter) -> None:
        self._buffer = berth
        self._readers = readers

    def release(self) -> None:
        """Nothing that is launched from now on reads the tensors."""
        self._buffer.release()
        self._readers.notify()


class ReceivingEnd:
    """Receives are posted ahead into a ring of buffers, and taken in their order.

    A step's class is said before its message comes (`expect`), which posts the receive; whoever
    computes the step takes the tensors while they are on their way (`receive`). A buffer is
    received into again when nobody has a tensor over it any more, and the stream has come behind
    the last read that it can know of: that of `release`, or else whatever had been launched when
    the last tensor was dropped.

    Args:
        edge: whose end this is.
    """

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._layouts = LayoutCache(edge.num_slices, edge.counters)
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
        """How many messages are expected that nobody has taken."""
        return len(self._expected_buffers)

    def has_free_buffer(self) -> bool:
        """Whether `expect` would find a free buffer without waiting for its reader or message."""
        berth = self._next()
        state = berth.state
        if isinstance(state, Taken | Released):
            return self._reading_done(berth) and state.handle.can_verify()
        return isinstance(state, Free)

    def reserve(self, shape_class: MessageSchema) -> None:
        """Have memory for the largest class that is to come, so that none is made later on."""
        with self._posting:
            layout = self._layouts.lookup(shape_class).layout
            for berth in self._buffers:
                if isinstance(berth.state, Free):
                    berth.reserve(layout)
                    self._order_after_allocation(berth)

    def expect(self, shape_class: MessageSchema) -> None:
        """Post the receive of one more step.

        Waits, for the edge's deadline at most, where the next buffer is still read.

        Args:
            shape_class: of the step; the sender's, which knows it by itself.

        Raises:
            BuffersHeld: all buffers are read, or expect messages that nobody takes.
            StreamFailed: the edge's stream failed, so that what reads a buffer will not let go.
            MessageMismatch: an earlier message was not the one that was expected.
            CommunicatorFailed: an earlier message did not come, or the receive cannot be posted.
            ChannelClosed: the end was closed, or has failed before.
        """
        with self._posting:
            self._status.check_open()
            berth = self._next()
            self._await_readers(berth)
            try:
                self._clear(berth)
                self._post(berth, self._layouts.lookup(shape_class))
            except BaseException as failure:  # half of it may have happened
                self._status.fail(failure)
                raise

    def receive(self) -> AsyncIntermediateTensors:
        """The tensors of the next step, which may still be on their way.

        Slices are gathered from here on, in the order of these calls: ranks of one group take
        their messages in one order.

        Returns:
            A mapping with a lease: `release()` it behind the last read, or let go of it and of
            everything read from it.

        Raises:
            ChannelError: no message is expected.
            CommunicatorFailed: a gather cannot be issued.
        """
        try:
            berth = self._expected_buffers.popleft()
        except IndexError:
            raise ChannelError(f"{self._edge.name}: no message is expected") from None
        try:
            tensors, arrival = berth.take()
        except BaseException as failure:
            self._status.fail(failure)
            raise
        return AsyncIntermediateTensors(
            tensors, [arrival], lease=_RecvBufferLease(berth, self._release_waiter)
        )

    def is_drained(self) -> bool:
        """Whether `settle` would come back, or raise, without waiting for a message."""
        states = [berth.state for berth in self._buffers]
        return all(s.handle.can_verify() for s in states if isinstance(s, Taken | Released))

    def drain(self) -> None:
        """Wait for every message that was taken, and look at its header.

        Raises what `expect` raises for earlier messages.
        """
        for berth in self._buffers:
            if isinstance(berth.state, Taken | Released):
                berth.state.handle.verify()

    def close(self) -> None:
        """Refuse what comes from now on; receives in flight keep their memory until they end."""
        self._status.close()

    def _next(self) -> RecvBuffer:
        return self._buffers[self._sequence % self._edge.depth]

    def _reading_done(self, berth: RecvBuffer) -> bool:
        """Whether nobody reads any more; or its message is lost, and nobody ever will."""
        if not isinstance(berth.state, Taken | Released):
            return False
        return not berth.in_use or berth.state.handle.message.is_lost()

    def _clear(self, berth: RecvBuffer) -> None:
        """Come behind everything that reads the buffer, and look at what it held."""
        if isinstance(berth.state, Taken | Released):
            berth.state.handle.verify()
            berth.clear()
            self._order_after(berth.reads_done)

    def _order_after(self, freed: Event) -> None:
        """What is received from now on comes behind the last read of a device."""
        if self._edge.effective_read_mode is ReadMode.HOST:
            return
        if self._ordered:
            self._comm.wait(freed)
        else:
            freed.synchronize(self._edge.deadline)

    def _order_after_allocation(self, berth: RecvBuffer) -> None:
        """Fresh memory may be what the stream still reads for whoever had it before."""
        if self._ordered and berth.newly_allocated:
            self._edge.stream.record(berth.allocated)
            self._comm.wait(berth.allocated)
            berth.newly_allocated = False

    def _await_readers(self, berth: RecvBuffer) -> None:
        if not isinstance(berth.state, Free):
            self._release_waiter.wait(
                partial(self._reading_done, berth), partial(self._holder, berth)
            )

    def _holder(self, berth: RecvBuffer) -> str:
        """Why the next buffer is not free, in words."""
        state, name = berth.state, self._edge.name
        if isinstance(state, Posted):
            return f"{name}: nobody has taken message {state.sequence}"
        assert isinstance(state, Taken | Released)
        return (
            f"{name}: tensors of message {state.sequence} are still referred to "
            f"{self._edge.deadline:g} s later, and all {self._edge.depth} buffers are in use"
        )

    def _post(self, berth: RecvBuffer, met: CachedLayout) -> None:
        layout, memory = met.layout, berth.reserve(met.layout)
        self._order_after_allocation(berth)
        current: AbstractContextManager[None] = nullcontext()
        if self._ordered:
            current = self._comm.current()
        with current:
            work = self._edge.communicator.irecv(memory, self._edge.peer)
        self._layouts.remember(met)
        berth.post(self._sequence, layout, work)
        self._sequence += 1
        self._edge.counters.add_message(layout.nbytes)
        self._expected_buffers.append(berth)
