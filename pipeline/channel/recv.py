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
        whole: ends when all tensors are there.
        headers: where the headers come of all messages that the tensors are made from: int64
            [slices, 8]; a fresh view, since whoever keeps one keeps the buffer from being used.
    """

    edge: Edge
    sequence: int
    layout: MessageLayout
    whole: Completion
    headers: Callable[[], Tensor]

    def check(self, headers: Sequence[Sequence[int]]) -> None:
        """Raise `MessageMismatch` unless these announce what is expected.

        Numbers, since an error keeps what was at hand where it was raised: a tensor would keep the
        buffer.
        """
        name = f"{self.edge.name}, message {self.sequence}"
        for words in headers:
            header = read_header(words, name)
            if header.sequence != self.sequence:
                raise MessageMismatch(f"{name}: message {header.sequence} came in its place")
            if header.shape_class != self.layout.shape_class.digest:
                raise MessageMismatch(f"{name}: it is not {self.layout.shape_class}")
            if header.nbytes != self.layout.nbytes:
                nbytes = self.layout.nbytes
                raise MessageMismatch(f"{name}: {header.nbytes} bytes instead of {nbytes}")

    def lost(self) -> bool:
        """Whether it has failed: it will never come, though its buffer may still be written to."""
        if not self.whole.done():
            return False
        try:
            self.whole.result(0.0)
        except EquipoiseError:
            return True
        return False

    def end(self) -> None:
        """Block the host until all tensors are there. Raises `CommunicatorFailed`."""
        began = time.monotonic_ns()
        self.whole.result(self.edge.deadline)
        self.edge.meter.waited(time.monotonic_ns() - began)


class HostRecvHandle:
    """A message into the host's memory: whoever waits blocks, and may read anywhere behind it.

    Attributes:
        awaited: what is to come.
    """

    def __init__(self, awaited: PendingMessage) -> None:
        self.awaited = awaited
        self._checking = threading.Lock()
        self._checked = False

    def is_completed(self) -> bool:
        """Whether `wait` would come back, or raise, at once."""
        return self.awaited.whole.done()

    def wait(self) -> None:
        """Block until the tensors are there, and are the ones that are expected.

        Raises:
            CommunicatorFailed: the message did not come by the deadline, or its sender is gone.
            MessageMismatch: another message came.
        """
        with self._checking:
            if self._checked:
                return
            self.awaited.end()
            self.awaited.check(self.awaited.headers().tolist())
            self._checked = True

    def settled(self) -> bool:
        """Whether `settle` would come back, or raise, at once."""
        return self.awaited.whole.done()

    def settle(self) -> None:
        """Block the host until nothing of the message is to come. Raises what `wait` raises."""
        self.wait()


class StreamRecvHandle:
    """A message that whoever waits orders the edge's stream behind; the host goes on.

    The host cannot look at a header in a device's memory without stopping for the device. So the
    stream copies it to the host's memory beside the forward, and `settle` looks at it, at the
    latest before the buffer is used again.

    Args:
        awaited: what is to come.
        words: int64 [slices, 8] of the host, where the headers are copied to.
        copied: recorded behind that copy.
    """

    def __init__(self, awaited: PendingMessage, words: Tensor, copied: Event) -> None:
        self.awaited = awaited
        self._words = words
        self._copied = copied
        self._ordering = threading.Lock()
        self._ordered = False

    def is_completed(self) -> bool:
        """Whether the tensors are there, or never will be."""
        return self.awaited.whole.done()

    def wait(self) -> None:
        """Order the edge's stream behind the message.

        Raises:
            StreamFailed: the edge's stream failed.
            CommunicatorFailed: the message is known to have failed.
        """
        with self._ordering:
            if not self._ordered:
                self.awaited.whole.wait(self.awaited.edge.stream)
                self._fetch_headers(self.awaited.edge.stream)

    def settled(self) -> bool:
        """Whether `settle` would come back, or raise, at once; begins to find out."""
        if not self.awaited.whole.done():
            return False
        self._ask()
        return self._copied.query()

    def settle(self) -> None:
        """Block the host until the message has come, and look at its headers.

        Raises:
            CommunicatorFailed: the message did not come by the deadline, or its sender is gone.
            StreamFailed: the edge's stream failed.
            MessageMismatch: another message came: what was computed from it is to be discarded.
        """
        self.awaited.end()
        self._ask()
        self._copied.synchronize(self.awaited.edge.deadline)
        self.awaited.check(self._words.tolist())

    def _ask(self) -> None:
        """Fetch the headers of a message that no reader has waited for: on a stream of their own,
        since the readers' may be behind later messages by now."""
        with self._ordering:
            if not self._ordered:
                self._fetch_headers(self.awaited.edge.accelerator.stream(Role.AUX))

    def _fetch_headers(self, stream: Stream) -> None:
        stream.launch(self._copy)
        stream.record(self._copied)
        self._ordered = True

    def _copy(self) -> None:
        headers = self.awaited.headers()
        self._words = self._words[: headers.shape[0]]
        self._words.copy_(headers, non_blocking=True)


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
    arrival: RecvHandle


@dataclass(frozen=True)
class Released:
    """The reader has launched its last read, it says; tensors may still be about.

    `kept`: some were, when it said so, and may be read once more.
    """

    sequence: int
    arrival: RecvHandle
    kept: bool


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
        freed: recorded behind the last read.
        made: for whoever writes into fresh memory to come behind.
        fresh: whether memory was made that nothing has come behind yet.
    """

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._message = TrackedBuffer(edge.memory)
        self._wholes = TrackedBuffer(edge.memory)
        self._words = host_headers(edge.accelerator, edge.parts)
        self._copied = edge.accelerator.event()
        self.freed, self.made = edge.accelerator.event(), edge.accelerator.event()
        self.fresh = False
        self.state: RecvBufferState = Free()
        self._changing = threading.RLock()

    @property
    def held(self) -> bool:
        """Whether there are tensors over the memory that somebody has taken."""
        return self._message.held or self._wholes.held

    def memory(self, layout: MessageLayout) -> Tensor:
        """Where such a message comes, uint8 [layout.nbytes]; only while the berth is free."""
        grown = [
            self._message.make_room(layout.nbytes),
            self._wholes.make_room(layout.gathered_nbytes),
        ]
        self.fresh = self.fresh or any(grown)
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
        arrival = self._arrival(posted, self._whole(posted))
        self.state = Taken(posted.sequence, arrival)
        return unpack(posted.layout, self._message.memory, self._wholes.memory), arrival

    def release(self) -> None:
        """The reader has launched its last read on the edge's stream."""
        with self._changing:
            if isinstance(self.state, Taken):
                self._mark()
                self.state = Released(self.state.sequence, self.state.arrival, self.held)

    def clear(self) -> None:
        """Nobody holds a tensor any more: whoever waits for `freed` comes behind every read.

        (Where the host reads there is no such event: what reads holds what it reads.)
        """
        with self._changing:
            if not isinstance(self.state, Released) or self.state.kept:
                self._mark()
            self.state = Free()

    def _mark(self) -> None:
        """`freed` is behind every read that was launched by now, where streams read."""
        if self._edge.read_by is ReadMode.STREAM:
            with suppress(StreamFailed):  # which whoever waits for `freed` hears
                self._edge.stream.record(self.freed)

    def _whole(self, posted: Posted) -> Completion:
        slices, layout = self._edge.slices, posted.layout
        if slices is None or not layout.sliced:
            return posted.work
        parts = gather_specs(layout, self._message.memory, self._wholes.memory)
        return gather(self._edge, slices, posted.work, parts)

    def _arrival(self, posted: Posted, whole: Completion) -> RecvHandle:
        headers = self._headers_of_slices if posted.layout.sliced else self._header
        awaited = PendingMessage(self._edge, posted.sequence, posted.layout, whole, headers)
        if self._edge.read_by is ReadMode.HOST:
            return HostRecvHandle(awaited)
        return StreamRecvHandle(awaited, self._words, self._copied)

    def _header(self) -> Tensor:
        return header_views(self._message.memory, 1)

    def _headers_of_slices(self) -> Tensor:
        return header_views(self._wholes.memory, self._edge.parts)


class _RecvBufferLease:
    """Ends with the reader's word; may be said from any thread, and more than once."""

    def __init__(self, berth: RecvBuffer, readers: ReleaseWaiter) -> None:
        self._berth = berth
        self._readers = readers

    def release(self) -> None:
        """Nothing that is launched from now on reads the tensors."""
        self._berth.release()
        self._readers.stir()


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
        self._layouts = LayoutCache(edge.parts, edge.meter)
        self._berths = [RecvBuffer(edge) for _ in range(edge.depth)]
        self._waiting: deque[RecvBuffer] = deque()
        self._ordered = edge.communicator.capabilities.stream_ordered
        self._comm = edge.accelerator.stream(Role.COMM)
        self._sequence = 0
        self._posting = threading.Lock()
        self._readers = ReleaseWaiter(edge)
        self._standing = EdgeStatus(edge.name)

    @property
    def expected(self) -> int:
        """How many messages are expected that nobody has taken."""
        return len(self._waiting)

    def room(self) -> bool:
        """Whether `expect` would find a free buffer without waiting for its reader or message."""
        berth = self._next()
        state = berth.state
        if isinstance(state, Taken | Released):
            return self._over(berth) and state.arrival.settled()
        return isinstance(state, Free)

    def reserve(self, shape_class: MessageSchema) -> None:
        """Have memory for the largest class that is to come, so that none is made later on."""
        with self._posting:
            layout = self._layouts.of(shape_class).layout
            for berth in self._berths:
                if isinstance(berth.state, Free):
                    berth.memory(layout)
                    self._behind_making(berth)

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
            self._standing.refuse_closed()
            berth = self._next()
            self._await_readers(berth)
            try:
                self._clear(berth)
                self._post(berth, self._layouts.of(shape_class))
            except BaseException as failure:  # half of it may have happened
                self._standing.fail(failure)
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
            berth = self._waiting.popleft()
        except IndexError:
            raise ChannelError(f"{self._edge.name}: no message is expected") from None
        try:
            tensors, arrival = berth.take()
        except BaseException as failure:
            self._standing.fail(failure)
            raise
        return AsyncIntermediateTensors(
            tensors, [arrival], lease=_RecvBufferLease(berth, self._readers)
        )

    def settled(self) -> bool:
        """Whether `settle` would come back, or raise, without waiting for a message."""
        states = [berth.state for berth in self._berths]
        return all(s.arrival.settled() for s in states if isinstance(s, Taken | Released))

    def settle(self) -> None:
        """Wait for every message that was taken, and look at its header.

        Raises what `expect` raises for earlier messages.
        """
        for berth in self._berths:
            if isinstance(berth.state, Taken | Released):
                berth.state.arrival.settle()

    def close(self) -> None:
        """Refuse what comes from now on; receives in flight keep their memory until they end."""
        self._standing.close()

    def _next(self) -> RecvBuffer:
        return self._berths[self._sequence % self._edge.depth]

    def _over(self, berth: RecvBuffer) -> bool:
        """Whether nobody reads any more; or its message is lost, and nobody ever will."""
        if not isinstance(berth.state, Taken | Released):
            return False
        return not berth.held or berth.state.arrival.awaited.lost()

    def _clear(self, berth: RecvBuffer) -> None:
        """Come behind everything that reads the buffer, and look at what it held."""
        if isinstance(berth.state, Taken | Released):
            berth.state.arrival.settle()
            berth.clear()
            self._behind(berth.freed)

    def _behind(self, freed: Event) -> None:
        """What is received from now on comes behind the last read of a device."""
        if self._edge.read_by is ReadMode.HOST:
            return
        if self._ordered:
            self._comm.wait(freed)
        else:
            freed.synchronize(self._edge.deadline)

    def _behind_making(self, berth: RecvBuffer) -> None:
        """Fresh memory may be what the stream still reads for whoever had it before."""
        if self._ordered and berth.fresh:
            self._edge.stream.record(berth.made)
            self._comm.wait(berth.made)
            berth.fresh = False

    def _await_readers(self, berth: RecvBuffer) -> None:
        if not isinstance(berth.state, Free):
            self._readers.wait(partial(self._over, berth), partial(self._holder, berth))

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
        layout, memory = met.layout, berth.memory(met.layout)
        self._behind_making(berth)
        current: AbstractContextManager[None] = nullcontext()
        if self._ordered:
            current = self._comm.current()
        with current:
            work = self._edge.communicator.irecv(memory, self._edge.peer)
        self._layouts.meet(met)
        berth.post(self._sequence, layout, work)
        self._sequence += 1
        self._edge.meter.message(layout.nbytes)
        self._waiting.append(berth)
