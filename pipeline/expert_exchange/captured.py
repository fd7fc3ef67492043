"""Kernels whose launches are captured with their first use, and replayed from then on."""

from collections.abc import Callable, Hashable

from torch import Tensor

from equipoise.hal.accelerator import Graph
from equipoise.hal.errors import ExchangeError
from equipoise.hal.stream import Stream
from equipoise.hal.work import Work
from equipoise.pipeline.expert_exchange.batch import Batch
from equipoise.pipeline.expert_exchange.kernels import ExchangeKernels
from equipoise.pipeline.expert_exchange.room import Room


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
        self._most = most
        # Beside each graph what it points to, so that no other object takes its identity.
        self._graphs: dict[Hashable, tuple[Graph, object]] = {}

    @property
    def rooms(self) -> tuple[Room, ...]:
        """Of the inner kernels."""
        return self._inner.rooms

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return len(self._graphs)

    def pack_rows(self, batch: Batch, room: Room, stream: Stream) -> None:
        """A graph for each room and batch. Raises `ExchangeError` when there are too many."""
        inner = self._inner
        key = ("pack rows", room.number, id(batch))
        self._replay(key, batch, stream, lambda: inner.pack_rows(batch, room, stream))

    def carry_rows(self, room: Room, stream: Stream) -> Work:
        """As ever."""
        return self._inner.carry_rows(room, stream)

    def unpack_rows(self, room: Room, stream: Stream) -> None:
        """A graph for each room."""
        inner = self._inner
        key = ("unpack rows", room.number)
        self._replay(key, room, stream, lambda: inner.unpack_rows(room, stream))

    def pack_results(self, rows: Tensor, room: Room, stream: Stream) -> None:
        """A graph for each room and tensor. Raises `ExchangeError` when there are too many."""
        inner = self._inner
        key = ("pack results", room.number, id(rows))
        self._replay(key, rows, stream, lambda: inner.pack_results(rows, room, stream))

    def carry_results(self, room: Room, stream: Stream) -> Work:
        """As ever."""
        return self._inner.carry_results(room, stream)

    def unpack_results(self, tokens: int, room: Room, stream: Stream) -> None:
        """A graph for each room and number of tokens."""
        inner = self._inner
        key = ("unpack results", room.number, tokens)
        self._replay(key, room, stream, lambda: inner.unpack_results(tokens, room, stream))

    def _replay(
        self, key: Hashable, kept: object, stream: Stream, launch: Callable[[], None]
    ) -> None:
        if key not in self._graphs:
            if len(self._graphs) >= self._most:
                raise ExchangeError(
                    f"{self._most} graphs are not enough: are batches and results persistent?"
                )
            graph = self._graph()
            graph.capture(stream, launch)
            self._graphs[key] = graph, kept
        self._graphs[key][0].replay(stream)
