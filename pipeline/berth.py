"""One place of a receiving ring: a buffer, and the message that comes into it."""

import threading
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from equipoise.hal.errors import StreamFailed
from equipoise.hal.work import Work
from equipoise.pipeline.arrival import Arrival, Awaited, HostArrival, StreamArrival
from equipoise.pipeline.buffer import Buffer, host_words
from equipoise.pipeline.edge import Edge, Reading
from equipoise.pipeline.gathering import Whole, gather, layer_group_specs
from equipoise.pipeline.layout import Layout
from equipoise.pipeline.packing import heads, unpack


@dataclass(frozen=True)
class Free:
    """Nothing is to come, and nobody reads."""


@dataclass(frozen=True)
class Posted:
    """A receive is posted, and nobody has taken its message."""

    sequence: int
    layout: Layout
    work: Work


@dataclass(frozen=True)
class Taken:
    """Somebody has the message's tensors, or may still have some."""

    sequence: int
    arrival: Arrival


@dataclass(frozen=True)
class Released:
    """The reader has launched its last read, it says; tensors may still be about.

    `kept`: some were, when it said so, and may be read once more.
    """

    sequence: int
    arrival: Arrival
    kept: bool


State = Free | Posted | Taken | Released


class Berth:
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
        self._message = Buffer(edge.memory)
        self._wholes = Buffer(edge.memory)
        self._words = host_words(edge.accelerator, edge.parts)
        self._copied = edge.accelerator.event()
        self.freed, self.made = edge.accelerator.event(), edge.accelerator.event()
        self.fresh = False
        self.state: State = Free()
        self._changing = threading.RLock()

    @property
    def held(self) -> bool:
        """Whether there are tensors over the memory that somebody has taken."""
        return self._message.held or self._wholes.held

    def memory(self, layout: Layout) -> Tensor:
        """Where such a message comes, uint8 [layout.nbytes]; only while the berth is free."""
        grown = [
            self._message.make_room(layout.nbytes),
            self._wholes.make_room(layout.gathered_nbytes),
        ]
        self.fresh = self.fresh or any(grown)
        return self._message.memory[: layout.nbytes]

    def post(self, sequence: int, layout: Layout, work: Work) -> None:
        """A receive into `memory` was posted."""
        self.state = Posted(sequence, layout, work)

    def take(self) -> tuple[dict[str, Tensor], Arrival]:
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
        if self._edge.read_by is Reading.STREAM:
            with suppress(StreamFailed):  # which whoever waits for `freed` hears
                self._edge.stream.record(self.freed)

    def _whole(self, posted: Posted) -> Whole:
        slices, layout = self._edge.slices, posted.layout
        if slices is None or not layout.sliced:
            return posted.work
        parts = layer_group_specs(layout, self._message.memory, self._wholes.memory)
        return gather(self._edge, slices, posted.work, parts)

    def _arrival(self, posted: Posted, whole: Whole) -> Arrival:
        headers = self._headers_of_slices if posted.layout.sliced else self._header
        awaited = Awaited(self._edge, posted.sequence, posted.layout, whole, headers)
        if self._edge.read_by is Reading.HOST:
            return HostArrival(awaited)
        return StreamArrival(awaited, self._words, self._copied)

    def _header(self) -> Tensor:
        return heads(self._message.memory, 1)

    def _headers_of_slices(self) -> Tensor:
        return heads(self._wholes.memory, self._edge.parts)
