"""The receiving end of an edge that is told nothing beforehand."""

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
    """A buffer of the ring; of the message, and of what is gathered from its slices."""

    def __init__(self, edge: Edge) -> None:
        self.message = TrackedBuffer(edge.allocate)
        self.gathered = TrackedBuffer(edge.allocate)

    @property
    def in_use(self) -> bool:
        return self.message.in_use or self.gathered.in_use


class DescribedRecvHandle:
    """One message, of which nothing is known before it is there.

    A handle as `AsyncIntermediateTensors` takes it.

    Args:
        finish: blocks until the message is there, and returns what is in it.
    """

    def __init__(self, finish: Callable[[], ReceivedValues]) -> None:
        self._values: ReceivedValues = {}
        self._finish = finish
        self._finishing = threading.Lock()
        self._over = False
        self._failure: EquipoiseError | None = None

    def is_completed(self) -> bool:
        """Whether it has come, or has failed."""
        return self._over

    def wait(self) -> None:
        """Block the host until it has come. Raises what `DescribedReceivingEnd` says."""
        self.run_once()
        if self._failure is not None:
            raise self._failure

    def take(self) -> ReceivedValues:
        """Tensors and constants by name, once: the end keeps nothing of them. Waits as `wait`."""
        self.wait()
        values, self._values = self._values, {}
        return values

    def run_once(self) -> None:
        """Block the host until it has come, or has failed."""
        with self._finishing:
            if not self._over:
                try:
                    self._values = self._finish()
                except Exception as failure:
                    self._failure = as_equipoise_error(failure, "a message could not be finished")
                self._finish, self._over = dict, True


class DescribedReceivingEnd:
    """Receives messages that say what they are, with receives that are posted before they come.

    In the host's memory a message is finished beside the reader, on the communication stream: its
    second part is asked for, and its slices are gathered, in the order of `receive`, whoever reads
    first. In a device's memory the host has to look at the header, so that happens at the first
    read; ranks that gather read in one order there.

    A wait raises `CommunicatorFailed` where a message did not come, `MessageMismatch` where it is
    another than the next, and `BuffersBusy` where all buffers are still read.

    Args:
        edge: whose end this is; it has more buffers than are posted ahead.
        ahead: receives that are posted ahead, as the sender was told.
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
        """The next message, on its way; returns at once.

        Raises:
            ChannelClosed: the end was closed, or an earlier message failed it.
        """
        self._status.check_open()
        incoming = DescribedRecvHandle(partial(self._next, self._sequence, self._last))
        self._sequence, self._last = self._sequence + 1, incoming
        self._post_ahead()
        if self._edge.effective_read_mode is ReadMode.HOST:
            self._edge.accelerator.stream(Role.COMM).launch(incoming.run_once)
        return incoming

    def close(self) -> None:
        """Refuse what comes from now on; receives in flight keep their memory until they end."""
        self._status.close()

    def _next(self, sequence: int, before: DescribedRecvHandle | None) -> ReceivedValues:
        """What is in a message, behind the one before it."""
        if before is not None:
            before.run_once()
        self._status.check_open()
        try:
            return self._finish(sequence)
        except BaseException as failure:  # half of it may have happened
            self._status.fail(failure)
            raise

    def _finish(self, sequence: int) -> ReceivedValues:
        if not self._posted:
            self._release_waiter.wait(self._next_is_free, self._holder)
            self._post_ahead()
        berth, first, work = self._posted.popleft()
        self._await(work)
        header = self._header(berth, sequence, first)
        if header.nbytes > first:
            self._receive_second_part(berth, header)
        layout = self._layout(berth, header)
        self._gather(berth, layout)
        self._edge.counters.add_message(
            max(first, header.nbytes),
            described=header.description_bytes,
            parts=1 + (header.nbytes > first),
        )
        self._first_part_sizes.record(header.nbytes)
        values: ReceivedValues = dict(unpack(layout, berth.message.memory, berth.gathered.memory))
        self._post_ahead()
        return values | dict(layout.schema.constants)

    def _await(self, work: Work) -> None:
        began = time.monotonic_ns()
        work.result(self._edge.deadline)
        self._edge.counters.add_message_wait(time.monotonic_ns() - began)

    def _header(self, berth: _DescribedRecvBuffer, sequence: int, first: int) -> Header:
        name = f"{self._edge.name}, message {sequence}"
        header = read_header(header_views(berth.message.memory, 1)[0].tolist(), name)
        if header.sequence != sequence:
            raise MessageMismatch(f"{name}: message {header.sequence} came in its place")
        if header.first_part_bytes != first:
            raise MessageMismatch(
                f"{name}: {header.first_part_bytes} bytes came first instead of {first}"
            )
        return header

    def _receive_second_part(self, berth: _DescribedRecvBuffer, header: Header) -> None:
        """Receive the second part behind the first."""
        first = berth.message.memory[: header.first_part_bytes].clone()
        berth.message.reserve(header.nbytes)
        berth.message.memory[: header.first_part_bytes].copy_(first)
        rest = berth.message.memory[header.first_part_bytes : header.nbytes]
        self._await(self._edge.require_second.irecv(rest, self._edge.peer))

    def _layout(self, berth: _DescribedRecvBuffer, header: Header) -> MessageLayout:
        """Of the message's class, which it describes, or which was described before."""
        payload = header.nbytes - header.description_bytes
        known = self._layouts.find(header.schema_digest)
        if header.description_bytes:
            text = berth.message.memory[payload : header.nbytes]
            met = self._layouts.lookup(MessageSchema.from_bytes(bytes(text.tolist())))
        elif known is not None:
            met = CachedLayout(known, is_new=False)
        else:
            raise self._undescribed()
        if met.layout.nbytes != payload or met.layout.schema.digest != header.schema_digest:
            raise self._undescribed()
        self._layouts.remember(met)
        return met.layout

    def _undescribed(self) -> MessageMismatch:
        return MessageMismatch(f"{self._edge.name}: a message of a class that nobody described")

    def _gather(self, berth: _DescribedRecvBuffer, layout: MessageLayout) -> None:
        if self._edge.slice_group is None or not layout.sliced_fields:
            return
        berth.gathered.reserve(layout.gathered_nbytes)
        parts = gather_specs(layout, berth.message.memory, berth.gathered.memory)
        for part in parts:
            communicator = self._edge.slice_group.gather_communicator
            communicator.all_gather(part.whole, part.slice).result(self._edge.deadline)
            self._edge.counters.add_gather()
        mine, every = (
            header_views(berth.message.memory, 1),
            header_views(berth.gathered.memory, self._edge.num_slices),
        )
        if not bool((every == mine).all()):
            raise MessageMismatch(f"{self._edge.name}: slices are of different messages")

    def _holder(self) -> str:
        return f"{self._edge.name}: all {self._edge.depth} buffers are still read"

    def _post_ahead(self) -> None:
        """Post what has been asked for and can be posted without waiting for a reader.

        Nothing else: a receive has a deadline, and an engine that is idle sends nothing.
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
        """Post the next receive into a buffer that nobody has a tensor over."""
        berth, first = self._buffers[self._count % self._edge.depth], self._first_part_sizes.pop()
        berth.message.reserve(first)
        memory = berth.message.memory[:first]
        with self._after_reads():
            work = self._edge.communicator.irecv(memory, self._edge.peer)
        self._posted.append((berth, first, work))
        self._count += 1

    def _after_reads(self) -> AbstractContextManager[None]:
        """A device may still read what no tensor is over any more; host code holds what it reads.

        (To wait for the stream there would be to wait for a program that waits for this thread.)
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
