"""One set of buffers, for one micro-batch in flight.

What a vendor's dispatch and combine have to do, in terms of tensors.

Kernels whose launches are captured with their first use, and replayed from then on.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from equipoise.hal.accelerator import Graph
from equipoise.hal.errors import ExchangeError
from equipoise.hal.stream import Stream
from equipoise.hal.work import Work
from equipoise.pipeline.all_to_all.formats import Batch, ReceivedRows


@dataclass(frozen=True, eq=False)
class BufferSet:
    """What an exchange's callers see of a set of buffers; addresses never change.

    Attributes:
        index: of the room.
        received: what `unpack_rows` fills.
        results: [max_tokens, top_k, ...], what `unpack_results` fills.
        status: int64, see `equipoise.pipeline.all_to_all.status`.
    """

    index: int
    received: ReceivedRows
    results: Tensor
    status: Tensor


@runtime_checkable
class ExchangeKernels(Protocol):
    """The device's part of an exchange, in rooms that it owns.

    `pack_*` and `unpack_*` launch on `stream` and return: persistent tensors, static shapes, no
    host synchronisation; they may be captured in a graph. `carry_*` sends what was packed, after
    what was launched on `stream`, and is not captured. Kernels that pack and send in one launch do
    it in `pack_*`, and their `carry_*` returns the work that ends with it.

    The caller keeps the order pack, carry, (the work's end,) unpack, and gives a room to the next
    batch only when everything that reads it has been ordered before.
    """

    @property
    def buffer_sets(self) -> tuple[BufferSet, ...]:
        """As many as batches may be in flight."""
        ...

    def pack_rows(self, batch: Batch, room: BufferSet, stream: Stream) -> None:
        """Make ready what goes to other ranks of `batch`; keep where its results will belong."""
        ...

    def send_rows(self, room: BufferSet, stream: Stream) -> Work:
        """Send it, and receive what the others send."""
        ...

    def unpack_rows(self, room: BufferSet, stream: Stream) -> None:
        """Fill `room.arrivals`, and enter into `room.words` what the headers say."""
        ...

    def pack_results(self, rows: Tensor, room: BufferSet, stream: Stream) -> None:
        """Make ready the results [entries, ...], one an entry of the arrivals."""
        ...

    def send_results(self, room: BufferSet, stream: Stream) -> Work:
        """Send them where their tokens came from."""
        ...

    def unpack_results(self, tokens: int, room: BufferSet, stream: Stream) -> None:
        """Fill the first `tokens` of `room.results`: zeros where nothing was sent."""
        ...


class CapturedKernels:
    """For callers whose batches and results are persistent: the same objects with other contents.

    What is carried is not captured, so a graph holds what lies between two collectives.

    Args:
        inner: the kernels; they may be captured, as `ExchangeKernels` says.
        graph: makes graphs (capability `graph_capture`).
        most: graphs that there may be; who passes new tensors in every step needs ever more.
    """

    def __init__(self, inner: ExchangeKernels, graph: Callable[[], Graph], most: int) -> None:
        self._inner = inner
        self._graph = graph
        self._max_graphs = most
        # Beside each graph what it points to, so that no other object takes its identity.
        self._graphs: dict[Hashable, tuple[Graph, object]] = {}

    @property
    def buffer_sets(self) -> tuple[BufferSet, ...]:
        """Of the inner kernels."""
        return self._inner.buffer_sets

    @property
    def num_graphs(self) -> int:
        """How many graphs there are."""
        return len(self._graphs)

    def pack_rows(self, batch: Batch, room: BufferSet, stream: Stream) -> None:
        """A graph for each room and batch. Raises `ExchangeError` when there are too many."""
        inner = self._inner
        key = ("pack rows", room.index, id(batch))
        self._replay(key, batch, stream, lambda: inner.pack_rows(batch, room, stream))

    def send_rows(self, room: BufferSet, stream: Stream) -> Work:
        """As ever."""
        return self._inner.send_rows(room, stream)

    def unpack_rows(self, room: BufferSet, stream: Stream) -> None:
        """A graph for each room."""
        inner = self._inner
        key = ("unpack rows", room.index)
        self._replay(key, room, stream, lambda: inner.unpack_rows(room, stream))

    def pack_results(self, rows: Tensor, room: BufferSet, stream: Stream) -> None:
        """A graph for each room and tensor. Raises `ExchangeError` when there are too many."""
        inner = self._inner
        key = ("pack results", room.index, id(rows))
        self._replay(key, rows, stream, lambda: inner.pack_results(rows, room, stream))

    def send_results(self, room: BufferSet, stream: Stream) -> Work:
        """As ever."""
        return self._inner.send_results(room, stream)

    def unpack_results(self, tokens: int, room: BufferSet, stream: Stream) -> None:
        """A graph for each room and number of tokens."""
        inner = self._inner
        key = ("unpack results", room.index, tokens)
        self._replay(key, room, stream, lambda: inner.unpack_results(tokens, room, stream))

    def _replay(
        self, key: Hashable, kept: object, stream: Stream, launch: Callable[[], None]
    ) -> None:
        if key not in self._graphs:
            if len(self._graphs) >= self._max_graphs:
                raise ExchangeError(
                    f"{self._max_graphs} graphs are not enough: are batches and results persistent?"
                )
            graph = self._graph()
            graph.capture(stream, launch)
            self._graphs[key] = graph, kept
        self._graphs[key][0].replay(stream)
