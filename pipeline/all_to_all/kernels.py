"""The interface of dispatch and combine kernels, and a wrapper that captures them in graphs."""

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
    """The buffers of one batch in flight, as callers see them; addresses never change.

    Attributes:
        index: of the set.
        received: filled by `unpack_rows`.
        results: [max_tokens, top_k, ...], filled by `unpack_results`.
        status: int64, see `equipoise.pipeline.all_to_all.status`.
    """

    index: int
    received: ReceivedRows
    results: Tensor
    status: Tensor


@runtime_checkable
class ExchangeKernels(Protocol):
    """The device's part of an exchange, with buffer sets of its own.

    `pack_*` and `unpack_*` launch on `stream` and return. They use persistent tensors and static
    shapes and do not synchronize with the host, so they may be captured in a graph. `send_*` sends
    what was packed, after what was launched on `stream`, and is not captured. Kernels that pack and
    send in one launch do it in `pack_*`; their `send_*` returns the work that ends with it.

    The caller keeps the order pack, send, end of the work, unpack, and reuses a buffer set only
    after everything that reads it.
    """

    @property
    def buffer_sets(self) -> tuple[BufferSet, ...]:
        """One per batch that may be in flight."""
        ...

    def pack_rows(self, batch: Batch, buffer_set: BufferSet, stream: Stream) -> None:
        """Pack the rows of `batch` for all ranks, and keep where its results belong."""
        ...

    def send_rows(self, buffer_set: BufferSet, stream: Stream) -> Work:
        """Send the packed rows, and receive those of the other ranks."""
        ...

    def unpack_rows(self, buffer_set: BufferSet, stream: Stream) -> None:
        """Fill `buffer_set.received`, and merge the headers into `buffer_set.status`."""
        ...

    def pack_results(self, rows: Tensor, buffer_set: BufferSet, stream: Stream) -> None:
        """Pack the results [entries, ...], one per entry of the received rows."""
        ...

    def send_results(self, buffer_set: BufferSet, stream: Stream) -> Work:
        """Send the packed results to the ranks of their tokens."""
        ...

    def unpack_results(self, tokens: int, buffer_set: BufferSet, stream: Stream) -> None:
        """Fill the first `tokens` rows of `buffer_set.results`; zeros where nothing was sent."""
        ...


class CapturedKernels:
    """Captures each launch in a graph at its first use, and replays it from then on.

    For callers whose batch and result tensors are persistent: the same objects with new contents.
    Sends are not captured, so a graph holds what lies between two collectives.

    Args:
        inner: the kernels; they must allow capture, as `ExchangeKernels` says.
        graph: creates graphs (capability `graph_capture`).
        max_graphs: bound on the number of graphs. A caller that passes new tensors in every step
            would need ever more graphs; the bound makes that an error.
    """

    def __init__(self, inner: ExchangeKernels, graph: Callable[[], Graph], max_graphs: int) -> None:
        self._inner = inner
        self._graph = graph
        self._max_graphs = max_graphs
        # With each graph the object in its key: while it lives, no other object can get its `id()`.
        self._graphs: dict[Hashable, tuple[Graph, object]] = {}

    @property
    def buffer_sets(self) -> tuple[BufferSet, ...]:
        """Those of the inner kernels."""
        return self._inner.buffer_sets

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs."""
        return len(self._graphs)

    def pack_rows(self, batch: Batch, buffer_set: BufferSet, stream: Stream) -> None:
        """One graph per buffer set and batch. Raises `ExchangeError` above `max_graphs`."""
        inner = self._inner
        key = ("pack rows", buffer_set.index, id(batch))
        self._replay(key, batch, stream, lambda: inner.pack_rows(batch, buffer_set, stream))

    def send_rows(self, buffer_set: BufferSet, stream: Stream) -> Work:
        """Not captured."""
        return self._inner.send_rows(buffer_set, stream)

    def unpack_rows(self, buffer_set: BufferSet, stream: Stream) -> None:
        """One graph per buffer set."""
        inner = self._inner
        key = ("unpack rows", buffer_set.index)
        self._replay(key, buffer_set, stream, lambda: inner.unpack_rows(buffer_set, stream))

    def pack_results(self, rows: Tensor, buffer_set: BufferSet, stream: Stream) -> None:
        """One graph per buffer set and tensor. Raises `ExchangeError` above `max_graphs`."""
        inner = self._inner
        key = ("pack results", buffer_set.index, id(rows))
        self._replay(key, rows, stream, lambda: inner.pack_results(rows, buffer_set, stream))

    def send_results(self, buffer_set: BufferSet, stream: Stream) -> Work:
        """Not captured."""
        return self._inner.send_results(buffer_set, stream)

    def unpack_results(self, tokens: int, buffer_set: BufferSet, stream: Stream) -> None:
        """One graph per buffer set and number of tokens."""
        inner = self._inner
        key = ("unpack results", buffer_set.index, tokens)
        self._replay(
            key, buffer_set, stream, lambda: inner.unpack_results(tokens, buffer_set, stream)
        )

    def _replay(
        self, key: Hashable, referenced: object, stream: Stream, launch: Callable[[], None]
    ) -> None:
        if key not in self._graphs:
            if len(self._graphs) >= self._max_graphs:
                raise ExchangeError(
                    f"{self._max_graphs} graphs are not enough: are batches and results persistent?"
                )
            graph = self._graph()
            graph.capture(stream, launch)
            self._graphs[key] = graph, referenced
        self._graphs[key][0].replay(stream)
