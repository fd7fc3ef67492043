"""The end of an edge that receives."""

import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from equipoise.hal.errors import ChannelError
from equipoise.hal.stream import Event, Role
from equipoise.pipeline.berth import Berth, Free, Posted, Released, Taken
from equipoise.pipeline.edge import Edge, Reading
from equipoise.pipeline.failures import Standing
from equipoise.pipeline.layouts import Layouts, Met
from equipoise.pipeline.readers import Readers
from equipoise.pipeline.shape_class import ShapeClass
from equipoise.pipeline.tensors import AsyncIntermediateTensors


class _Lease:
    """Ends with the reader's word; may be said from any thread, and more than once."""

    def __init__(self, berth: Berth, readers: Readers) -> None:
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
        self._layouts = Layouts(edge.parts, edge.meter)
        self._berths = [Berth(edge) for _ in range(edge.depth)]
        self._waiting: deque[Berth] = deque()
        self._ordered = edge.communicator.capabilities.stream_ordered
        self._comm = edge.accelerator.stream(Role.COMM)
        self._sequence = 0
        self._posting = threading.Lock()
        self._readers = Readers(edge)
        self._standing = Standing(edge.name)

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

    def reserve(self, shape_class: ShapeClass) -> None:
        """Have memory for the largest class that is to come, so that none is made later on."""
        with self._posting:
            layout = self._layouts.of(shape_class).layout
            for berth in self._berths:
                if isinstance(berth.state, Free):
                    berth.memory(layout)
                    self._behind_making(berth)

    def expect(self, shape_class: ShapeClass) -> None:
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
        return AsyncIntermediateTensors(tensors, [arrival], lease=_Lease(berth, self._readers))

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

    def _next(self) -> Berth:
        return self._berths[self._sequence % self._edge.depth]

    def _over(self, berth: Berth) -> bool:
        """Whether nobody reads any more; or its message is lost, and nobody ever will."""
        if not isinstance(berth.state, Taken | Released):
            return False
        return not berth.held or berth.state.arrival.awaited.lost()

    def _clear(self, berth: Berth) -> None:
        """Come behind everything that reads the buffer, and look at what it held."""
        if isinstance(berth.state, Taken | Released):
            berth.state.arrival.settle()
            berth.clear()
            self._behind(berth.freed)

    def _behind(self, freed: Event) -> None:
        """What is received from now on comes behind the last read of a device."""
        if self._edge.read_by is Reading.HOST:
            return
        if self._ordered:
            self._comm.wait(freed)
        else:
            freed.synchronize(self._edge.deadline)

    def _behind_making(self, berth: Berth) -> None:
        """Fresh memory may be what the stream still reads for whoever had it before."""
        if self._ordered and berth.fresh:
            self._edge.stream.record(berth.made)
            self._comm.wait(berth.made)
            berth.fresh = False

    def _await_readers(self, berth: Berth) -> None:
        if not isinstance(berth.state, Free):
            self._readers.wait(partial(self._over, berth), partial(self._holder, berth))

    def _holder(self, berth: Berth) -> str:
        """Why the next buffer is not free, in words."""
        state, name = berth.state, self._edge.name
        if isinstance(state, Posted):
            return f"{name}: nobody has taken message {state.sequence}"
        assert isinstance(state, Taken | Released)
        return (
            f"{name}: tensors of message {state.sequence} are still referred to "
            f"{self._edge.deadline:g} s later, and all {self._edge.depth} buffers are in use"
        )

    def _post(self, berth: Berth, met: Met) -> None:
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
