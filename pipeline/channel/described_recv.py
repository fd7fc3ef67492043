"""The receiving end of an edge whose messages describe their schemas (`DescribedFraming`)."""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor

from equipoise.hal.errors import (
    ChannelError,
    EquipoiseError,
    MessageMismatch,
)
from equipoise.hal.stream import Role
from equipoise.hal.work import Work
from equipoise.pipeline.channel.buffers import ReleaseWaiter, TrackedBuffer
from equipoise.pipeline.channel.edge import Edge, EdgeStatus, ReadMode, as_equipoise_error
from equipoise.pipeline.channel.framing import FirstPartSizes
from equipoise.pipeline.channel.gather import gather_specs
from equipoise.pipeline.channel.message import (
    CachedLayout,
    Header,
    LayoutCache,
    MessageLayout,
    header_views,
    read_header,
    unpack,
)
from equipoise.pipeline.channel.schema import Constant, MessageSchema

ReceivedValues = dict[str, Tensor | Constant]


class _DescribedRecvBuffer:
    """One buffer of the ring: of a message, and of what is gathered from its slices."""

    def __init__(self, edge: Edge) -> None:
        self.message = TrackedBuffer(edge.allocate)
        self.gathered = TrackedBuffer(edge.allocate)

    @property
    def in_use(self) -> bool:
        return self.message.in_use or self.gathered.in_use


class DescribedRecvHandle:
    """Handle of one message, of which nothing is known before it arrives.

    `AsyncIntermediateTensors` accepts it as a handle.

    Args:
        finish: blocks until the message has arrived, and returns its content.
    """

    def __init__(self, finish: Callable[[], ReceivedValues]) -> None:
        self._values: ReceivedValues = {}
        self._finish = finish
        self._finishing = threading.Lock()
        self._completed = False
        self._failure: EquipoiseError | None = None

    def is_completed(self) -> bool:
        """Whether the message has arrived or failed."""
        return self._completed

    def wait(self) -> None:
        """Block the host until the message has arrived. Raises as `DescribedReceivingEnd`."""
        self.run_once()
        if self._failure is not None:
            raise self._failure

    def take(self) -> ReceivedValues:
        """Return tensors and constants by name, and forget them. Waits as `wait`."""
        self.wait()
        values, self._values = self._values, {}
        return values

    def run_once(self) -> None:
        """Block the host until the message has arrived or failed."""
        with self._finishing:
            if not self._completed:
                try:
                    self._values = self._finish()
                except Exception as failure:
                    self._failure = as_equipoise_error(failure, "a message could not be finished")
                self._finish, self._completed = dict, True


class DescribedReceivingEnd:
    """Receives messages that describe themselves, with receives posted before they arrive.

    In host memory a message is completed on the communication stream, concurrently with readers:
    its second part is received and its slices are gathered in the order of `receive`, whatever is
    read first. In device memory the host has to read the header, so this happens at the first read;
    there, ranks of one slice group have to read in one order.

    Waiting raises `CommunicatorFailed` if a message did not arrive, `MessageMismatch` if another
    message arrived, and `BuffersBusy` if all buffers are still read.

    Args:
        edge: of this end; it has more buffers than receives that are posted ahead.
        ahead: receives that are posted ahead; the sender has the same number.
    """

    def __init__(self, edge: Edge, ahead: int) -> None:
        if not 0 < ahead < edge.depth:
            raise ChannelError(f"{edge.name}: {ahead} receives ahead in {edge.depth} buffers")
        self._edge = edge
        self._first_part_sizes = FirstPartSizes(ahead)
        self._buffers = [_DescribedRecvBuffer(edge) for _ in range(edge.depth)]
        self._posted: deque[tuple[_DescribedRecvBuffer, int, Work]] = deque()
        self._layouts = LayoutCache(edge.num_slices, edge.counters)
        self._count = 0
        self._sequence = 0
        self._last: DescribedRecvHandle | None = None
        self._posting = threading.Lock()
        self._reads_done = edge.accelerator.event()
        self._release_waiter = ReleaseWaiter(edge)
        self._status = EdgeStatus(edge.name)

    def receive(self) -> DescribedRecvHandle:
        """Return a handle of the next message, at once.

        Raises:
            ChannelClosed: the end was closed, or an earlier message failed it.
        """
        self._status.check_open()
        handle = DescribedRecvHandle(partial(self._next, self._sequence, self._last))
        self._sequence, self._last = self._sequence + 1, handle
        self._post_ahead()
        if self._edge.effective_read_mode is ReadMode.HOST:
            self._edge.accelerator.stream(Role.COMM).launch(handle.run_once)
        return handle

    def close(self) -> None:
        """Refuse further messages; receives in flight keep their memory until they end."""
        self._status.close()

    def _next(self, sequence: int, previous: DescribedRecvHandle | None) -> ReceivedValues:
        """Return the content of a message, after completing the one before it."""
        if previous is not None:
            previous.run_once()
        self._status.check_open()
        try:
            return self._finish(sequence)
        except BaseException as failure:  # some of it may have been done
            self._status.fail(failure)
            raise

    def _finish(self, sequence: int) -> ReceivedValues:
        if not self._posted:
            self._release_waiter.wait(self._next_is_free, self._holder)
            self._post_ahead()
        buffer, first_part_bytes, work = self._posted.popleft()
        self._await(work)
        header = self._header(buffer, sequence, first_part_bytes)
        if header.nbytes > first_part_bytes:
            self._receive_second_part(buffer, header)
        layout = self._layout(buffer, header)
        self._gather(buffer, layout)
        self._edge.counters.add_message(
            max(first_part_bytes, header.nbytes),
            description_bytes=header.description_bytes,
            parts=1 + (header.nbytes > first_part_bytes),
        )
        self._first_part_sizes.record(header.nbytes)
        values: ReceivedValues = dict(unpack(layout, buffer.message.memory, buffer.gathered.memory))
        self._post_ahead()
        return values | dict(layout.schema.constants)

    def _await(self, work: Work) -> None:
        began = time.monotonic_ns()
        work.result(self._edge.deadline)
        self._edge.counters.add_message_wait(time.monotonic_ns() - began)

    def _header(self, buffer: _DescribedRecvBuffer, sequence: int, first_part_bytes: int) -> Header:
        name = f"{self._edge.name}, message {sequence}"
        header = read_header(header_views(buffer.message.memory, 1)[0].tolist(), name)
        if header.sequence != sequence:
            raise MessageMismatch(f"{name}: message {header.sequence} came in its place")
        if header.first_part_bytes != first_part_bytes:
            raise MessageMismatch(
                f"{name}: {header.first_part_bytes} bytes came first instead of {first_part_bytes}"
            )
        return header

    def _receive_second_part(self, buffer: _DescribedRecvBuffer, header: Header) -> None:
        """Receive the second part after the first, in a buffer that is large enough for both."""
        first_part = buffer.message.memory[: header.first_part_bytes].clone()
        buffer.message.reserve(header.nbytes)
        buffer.message.memory[: header.first_part_bytes].copy_(first_part)
        second = buffer.message.memory[header.first_part_bytes : header.nbytes]
        self._await(self._edge.require_second.irecv(second, self._edge.peer))

    def _layout(self, buffer: _DescribedRecvBuffer, header: Header) -> MessageLayout:
        """Return the layout of the schema that the message describes, or refers to by digest."""
        payload = header.nbytes - header.description_bytes
        layout = self._layouts.find(header.schema_digest)
        if header.description_bytes:
            text = buffer.message.memory[payload : header.nbytes]
            cached = self._layouts.lookup(MessageSchema.from_bytes(bytes(text.tolist())))
        elif layout is not None:
            cached = CachedLayout(layout, is_new=False)
        else:
            raise self._undescribed()
        if cached.layout.nbytes != payload or cached.layout.schema.digest != header.schema_digest:
            raise self._undescribed()
        self._layouts.remember(cached)
        return cached.layout

    def _undescribed(self) -> MessageMismatch:
        return MessageMismatch(f"{self._edge.name}: a message of a schema that was not described")

    def _gather(self, buffer: _DescribedRecvBuffer, layout: MessageLayout) -> None:
        if self._edge.slice_group is None or not layout.sliced_fields:
            return
        buffer.gathered.reserve(layout.gathered_nbytes)
        parts = gather_specs(layout, buffer.message.memory, buffer.gathered.memory)
        for part in parts:
            communicator = self._edge.slice_group.gather_communicator
            communicator.all_gather(part.whole, part.slice).result(self._edge.deadline)
            self._edge.counters.add_gather()
        own, gathered = (
            header_views(buffer.message.memory, 1),
            header_views(buffer.gathered.memory, self._edge.num_slices),
        )
        if not bool((gathered == own).all()):
            raise MessageMismatch(f"{self._edge.name}: slices are of different messages")

    def _holder(self) -> str:
        return f"{self._edge.name}: all {self._edge.depth} buffers are still read"

    def _post_ahead(self) -> None:
        """Post receives of messages that were requested, as long as no reader has to be waited for.

        No others: a receive has a deadline, and an idle engine sends nothing.
        """
        with self._posting:
            while (
                self._count < self._sequence
                and self._first_part_sizes.num_known
                and self._next_is_free()
            ):
                self._post()

    def _next_is_free(self) -> bool:
        return not self._buffers[self._count % self._edge.depth].in_use

    def _post(self) -> None:
        """Post the next receive, into a buffer that no tensor refers to."""
        buffer, first_part_bytes = (
            self._buffers[self._count % self._edge.depth],
            self._first_part_sizes.pop(),
        )
        buffer.message.reserve(first_part_bytes)
        memory = buffer.message.memory[:first_part_bytes]
        with self._after_reads():
            work = self._edge.communicator.irecv(memory, self._edge.peer)
        self._posted.append((buffer, first_part_bytes, work))
        self._count += 1

    def _after_reads(self) -> AbstractContextManager[None]:
        """Order a receive after the reads of its buffer.

        A device may still read memory that no tensor refers to any more. Host code holds a tensor
        while it reads; and waiting for the stream there could wait for a program that waits for
        this thread.
        """
        if self._edge.effective_read_mode is ReadMode.HOST:
            return nullcontext()
        self._edge.stream.record(self._reads_done)
        if self._edge.communicator.capabilities.stream_ordered:
            comm = self._edge.accelerator.stream(Role.COMM)
            comm.wait(self._reads_done)
            return comm.current()
        self._reads_done.synchronize(self._edge.deadline)
        return nullcontext()
