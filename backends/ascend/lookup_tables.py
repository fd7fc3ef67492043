"""Tables that a routing pass looks replicas up in, made when tables are committed.

The device has no fast search, and each launch costs more than its work on a batch of a decode step.
So a commit also writes what a search would find: for each expert and each of the 256 positions that
a draw can have, the slot (`equipoise.hal.routing`, "Hashed"). A pass is one multiplication and one
lookup. Both sets lie in one table, mirrored around a row for padding: row `centre + kind` belongs
to the first set, row `centre - kind` to the second, where kind is the expert's number + 1, and 0 or
experts + 1 for padding below and above. So one signed word per layer says which set is live, and
multiplying by it chooses the set.

Sequences of numbers that depend on an element's index in its batch alone, kept on the device.

A pass takes a slice of one, which launches nothing. They grow to the largest batch; what was
outgrown is kept, since streams and graphs may still read it.
"""

import threading
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from equipoise.backends.ascend.hashing import mix32, shift_right
from equipoise.backends.common.bounded_wait import poll
from equipoise.backends.devices.memory import copy, pinned
from equipoise.backends.devices.stream import own_stream
from equipoise.hal.errors import KernelError, StreamTimeout
from equipoise.hal.kernels import Tables, TableUpdate
from equipoise.hal.routing import MASK32, POSITION_BITS, POSITIONS, WINDOWS, position_counts
from equipoise.hal.routing_rules import KNUTH32
from equipoise.hal.stream import Stream

COPY_SECONDS = 60.0
"""Within which tables of some MiB are on the device, whatever else it has to do."""


class ReplicaTables:
    """What belongs to one `Tables`.

    Attributes:
        experts: logical experts per layer.
        replicas: int32 [layers, (2 * experts + 3) * 256], the slot of each kind and position.
        runs: int32 [layers, 2, 2 * experts + 3], by kind where the expert's run begins in `slots`,
            and its length, at least 1.
        slots: int32 [layers, 2 * slots + 1], the runs of both sets, then the invalid slot.
        words: int32 [2, layers], 256 and 1 while the first set is live, -256 and -1 while the
            second is.
        padding: int32 [1], the column of `runs` that is padding's.
    """

    def __init__(self, tables: Tables, stream: Stream) -> None:
        self.experts = tables.experts
        self.centre = tables.experts + 1
        host_tables = empty_tables(tables.layers, tables.experts, tables.slots, torch.device("cpu"))
        self._all = tuple(copy_to_device(table, stream) for table in host_tables)
        self.replicas, self.runs, self.slots, self.words, self.padding = self._all
        self._recorded_streams: set[object] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of the device."""
        return sum(table.nbytes for table in self._all)

    def record_use(self, stream: Stream) -> None:
        """Tell the device's allocator that `stream` uses these, once per stream."""
        own = own_stream(stream)
        if own.capturing:
            return  # the graph keeps the program, and with it these
        if own.native_stream not in self._recorded_streams:
            for table in self._all:
                table.record_stream(own.native_stream)
            self._recorded_streams.add(own.native_stream)

    def install(
        self, update: Tensor, start: Tensor, replicas: Tensor, layers: Tensor, words: Tensor
    ) -> None:
        """Fill the idle sets, then write the words; on the stream of the commit.

        Args:
            update: `slots_by_position` of the update, int32 [n, experts * 256], on the device.
            start: int32 [n, experts + 1], and
            replicas: int32 [n, slots], of the update.
            layers: int64 [n], which they are.
            words: int64 [n], their new generation words.
        """
        count = replicas.shape[1]
        second = (words & 1)[:, None]
        signs = 1 - 2 * second
        device = layers.device
        ranks = torch.arange(1, self.centre, device=device)
        columns = self.centre + signs * ranks
        kinds = 2 * self.centre + 1
        rows = (layers[:, None] * kinds + columns).view(-1)
        self.replicas.view(-1, POSITIONS).index_copy_(0, rows, update.view(-1, POSITIONS))
        copies = (start[:, 1:] - start[:, :-1]).clamp(min=1)
        runs = torch.stack([start[:, :-1] + (second * count).int(), copies], dim=1)
        places = layers[:, None, None] * 2 + torch.arange(2, device=device)[:, None]
        places = (places * kinds + columns[:, None]).view(-1)
        self.runs.view(-1).index_copy_(0, places, runs.view(-1))
        places = layers[:, None] * self.slots.shape[1] + second * count
        places = (places + torch.arange(count, device=device)).view(-1)
        self.slots.view(-1).index_copy_(0, places, replicas.reshape(-1))
        layer_words = torch.cat([signs * POSITIONS, signs], dim=1).int().t().contiguous()
        self.words.index_copy_(1, layers, layer_words)


def empty_tables(
    layers: int, experts: int, slots: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `ReplicaTables` holds before the first commit, in the order of its attributes."""
    centre, invalid = experts + 1, slots
    kinds = 2 * centre + 1
    ends = [0, centre, kinds - 1]
    replicas = torch.zeros(layers, kinds, POSITIONS, dtype=torch.int32, device=device)
    replicas[:, ends] = invalid
    runs = torch.zeros(layers, 2, kinds, dtype=torch.int32, device=device)
    runs[:, 0, ends] = 2 * invalid
    runs[:, 1] = 1  # a layer that was never committed has runs of no length
    entries = torch.zeros(layers, 2 * invalid + 1, dtype=torch.int32, device=device)
    entries[:, -1] = invalid
    words = torch.tensor([[POSITIONS], [1]], dtype=torch.int32, device=device).expand(2, layers)
    padding = torch.tensor([centre], dtype=torch.int32, device=device)
    return replicas.view(layers, -1), runs, entries, words.contiguous(), padding


def table_bytes(layers: int, experts: int, slots: int) -> int:
    """Bytes of the device that the `ReplicaTables` of such tables take."""
    # Made where nothing is stored, so that the figure is that of the tables and no second formula.
    return sum(table.nbytes for table in empty_tables(layers, experts, slots, torch.device("meta")))


def slots_by_position(update: TableUpdate) -> Tensor:
    """The slot of each expert and position, int32 [layers, experts * 256], in page-locked memory.

    A malformed table has whatever comes out, of the right size: what a pass makes of it is not
    defined, but it must stay inside its tables.
    """
    layers, experts = update.start.shape[0], update.start.shape[1] - 1
    width = experts * POSITIONS
    block = pinned(layers * width * torch.int32.itemsize).view(torch.int32).view(layers, width)
    for row, start, replicas, cumulative in zip(
        block, update.start, update.replicas, update.cumulative, strict=True
    ):
        ends = position_counts(cumulative)
        before = torch.zeros_like(ends)
        before[1:] = ends[:-1]
        before[start[:-1].long().clamp(0, len(ends) - 1)] = 0
        lengths = (ends - before).clamp(0, POSITIONS)
        # NumPy's is five times as fast as torch's.
        repeats = np.repeat(replicas.numpy(), lengths.numpy())[:width]
        row[: len(repeats)] = torch.from_numpy(repeats)
        row[len(repeats) :] = 0
    return block


_tables_by_identity: dict[int, ReplicaTables] = {}
"""By the identity of the generation words, for as long as these live."""
_making = threading.Lock()


def replica_tables_of(tables: Tables, stream: Stream) -> ReplicaTables:
    """Those of `tables`, made when they are first asked for.

    Raises `KernelError` in a capture that asks first: a graph would make them anew at each replay.
    """
    key = id(tables.generation)
    replica_tables = _tables_by_identity.get(key)
    if replica_tables is not None:
        return replica_tables
    # The gate first: who launches holds it, and may come here.
    with own_stream(stream).issue_lock, _making:
        replica_tables = _tables_by_identity.get(key)
        if replica_tables is None:
            if is_captured(stream):
                raise KernelError(
                    "tables: first used while a stream is captured; call `warm` or commit before"
                )
            replica_tables = _tables_by_identity[key] = ReplicaTables(tables, stream)
            weakref.finalize(tables.generation, _tables_by_identity.pop, key, None).atexit = False
    return replica_tables


def is_captured(stream: Stream) -> bool:
    """Whether `stream` is being captured, by us or by an engine."""
    own = own_stream(stream)
    return own.capturing or own.device.runtime.is_captured(own.native_stream)


def copy_to_device(values: Tensor, stream: Stream) -> Tensor:
    """A copy of host memory on the device of `stream`, there when this returns.

    Copied on a stream of its own, which the host waits for: any stream may read it from now on, and
    what `stream` holds is not waited for. Raises `StreamTimeout` after `COPY_SECONDS`.
    """
    own = own_stream(stream)
    with torch.inference_mode(False), own.issue_lock:
        staging = pinned(values.nbytes).view(values.dtype).view(values.shape).copy_(values)
        side = own.device.cached_stream("tables")
        with own.device.runtime.current(side):
            device_tensor = torch.empty_like(values, device=own.device.torch)
            copy(device_tensor, staging)
        if not poll(side.query, COPY_SECONDS):
            raise StreamTimeout(f"tables of replicas: not copied within {COPY_SECONDS:g} s")
    return device_tensor


SHORT_RUNS = 22
"""Length of a run up to which turns fit in int32."""
TURNS32 = 232792560
"""The least common multiple of 1 to 22: a turn modulo it is the same entry of each shorter run."""
MIN_SEQUENCE = 4096
"""Initial elements of a sequence, which doubles when a batch is larger: enough for 512 tokens of
eight experts, so that most decode steps never grow one."""

Make = Callable[[Tensor], Tensor]
"""From places, int64 [n], to what stands there; on any device, without a scalar from the host."""


class BatchIndices:
    """Draws, rows and turns by index, of one accelerator."""

    def __init__(self) -> None:
        self._latest: dict[object, Tensor] = {}
        self._outgrown: list[Tensor] = []

    def draws(self, experts: int, begin: int, count: int, stream: Stream) -> Tensor:
        """`count` draws from place `begin` on, int32: the row for padding plus the position."""
        make = partial(_draws, (experts + 1) * POSITIONS)
        return self._slice(("draws", experts), make, begin, count, stream, WINDOWS)

    def rows(self, top_k: int, count: int, stream: Stream) -> Tensor:
        """The row of each element, int32."""
        return self._slice(("rows", top_k), partial(_rows, top_k), 0, count, stream)

    def turns(self, top_k: int, longest: int, count: int, stream: Stream) -> Tensor:
        """vLLM's turn of each element, for runs of up to `longest` entries; int32 or int64."""
        short = longest <= SHORT_RUNS
        make = partial(_turns, top_k, short)
        return self._slice(("turns", top_k, short), make, 0, count, stream)

    def _slice(
        self, key: object, make: Make, begin: int, count: int, stream: Stream, windows: int = 0
    ) -> Tensor:
        end, own = begin + count, own_stream(stream)
        indices = self._latest.get(key)
        if indices is None or indices.numel() < end:
            if is_captured(stream):
                # During a capture nothing can be copied from the host, so the graph computes it.
                return make(torch.arange(begin, end, device=own.device.torch))
            indices = self._grow(key, make, end, stream, windows)
        own.keep_alive(indices)
        return indices[begin:end]

    def _grow(self, key: object, make: Make, end: int, stream: Stream, windows: int) -> Tensor:
        """The sequence with at least `end` elements. Made under the issue lock, so that no two
        threads make the same one."""
        with own_stream(stream).issue_lock:
            indices = self._latest.get(key)
            if indices is not None and indices.numel() >= end:
                return indices
            if indices is not None:
                # Kept: a captured graph or a launch may still read the shorter one.
                self._outgrown.append(indices)
            size = windows + MIN_SEQUENCE
            while size < end:
                size = windows + 2 * (size - windows)
            self._latest[key] = longer_indices = copy_to_device(make(torch.arange(size)), stream)
            return longer_indices


def _draws(base: int, places: Tensor) -> Tensor:
    return (shift_right(mix32(places, 0, 0, 0), 32 - POSITION_BITS) + base).int()


def _rows(top_k: int, places: Tensor) -> Tensor:
    return torch.div(places, top_k, rounding_mode="floor").int()


def _turns(top_k: int, short: bool, places: Tensor) -> Tensor:
    turns = (torch.div(places, top_k, rounding_mode="floor") * KNUTH32) & MASK32
    # No turn is negative, and torch_npu's `remainder` warns of a format that nobody asked for.
    return torch.fmod(turns, TURNS32).int() if short else turns
