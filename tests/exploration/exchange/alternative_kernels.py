"""Other kernels of the exchange, as a vendor would bring them: nothing is like the reference's.

Every rank sends its whole batch to every other; who receives it picks what falls on its slots,
choice by choice. Packing and sending are one operation.
"""

from collections.abc import Iterator
from functools import partial
from math import prod

import torch
from torch import Tensor

from equipoise.hal.stream import Stream
from equipoise.hal.work import Work
from equipoise.pipeline.all_to_all import status
from equipoise.pipeline.all_to_all.formats import Batch, ExchangeFormat, ReceivedRows, RowFormat
from equipoise.pipeline.all_to_all.kernels import BufferSet
from equipoise.pipeline.all_to_all.torch_kernels import AllocateBytes
from equipoise.pipeline.all_to_all.transport import AllToAllTransport


class NaiveKernels:
    """Three buffer sets; loops over Python numbers."""

    def __init__(
        self, form: ExchangeFormat, transport: AllToAllTransport, allocate: AllocateBytes
    ) -> None:
        self._form = form
        self._wire = transport
        slots = RowFormat((form.top_k,), torch.int32)
        self._parts = [
            (1, RowFormat((2,), torch.int64)),  # generation, tokens
            (form.experts, RowFormat((), torch.int32)),
            *((form.max_tokens, row) for row in (slots, *form.payloads)),
        ]
        size = sum(count * row.nbytes for count, row in self._parts)
        back = form.max_entries * form.result.nbytes
        self._blobs = [
            [allocate(form.ranks * n).view(form.ranks, n) for n in (size, size, back, back)]
            for _ in range(3)
        ]
        self._buffer_sets = tuple(self._buffer_set(number, allocate) for number in range(3))
        self._works: dict[int, Work] = {}

    @property
    def buffer_sets(self) -> tuple[BufferSet, ...]:
        return self._buffer_sets

    def pack_rows(self, batch: Batch, buffer_set: BufferSet, stream: Stream) -> None:
        source, into = self._blobs[buffer_set.index][:2]
        stream.launch(partial(self._pack, batch, source))
        self._works[buffer_set.index] = self._wire.all_to_all(into, source, stream)

    def send_rows(self, buffer_set: BufferSet, stream: Stream) -> Work:
        return self._works.pop(buffer_set.index)

    def unpack_rows(self, buffer_set: BufferSet, stream: Stream) -> None:
        stream.launch(partial(self._unpack, buffer_set))

    def pack_results(self, rows: Tensor, buffer_set: BufferSet, stream: Stream) -> None:
        source, into = self._blobs[buffer_set.index][2:]
        stream.launch(partial(self._copy_rows, rows, source))
        self._works[buffer_set.index] = self._wire.all_to_all(into, source, stream)

    def send_results(self, buffer_set: BufferSet, stream: Stream) -> Work:
        return self._works.pop(buffer_set.index)

    def unpack_results(self, tokens: int, buffer_set: BufferSet, stream: Stream) -> None:
        stream.launch(partial(self._take, tokens, buffer_set))

    def _pack(self, batch: Batch, source: Tensor) -> None:
        head = torch.tensor([int(batch.generation[0]), batch.tokens])
        whole = [_bytes(t) for t in (head, batch.loads, batch.slots, *batch.payloads)]
        start = 0
        for (count, row), data in zip(self._parts, whole, strict=True):
            source[:, start : start + data.numel()] = data
            start += count * row.nbytes

    def _copy_rows(self, rows: Tensor, source: Tensor) -> None:
        source[:] = _bytes(rows)

    def _unpack(self, buffer_set: BufferSet) -> None:
        form, arrivals = self._form, buffer_set.received
        arrivals.entry_slots.fill_(form.invalid_slot)
        excess = torch.zeros(2, dtype=torch.int64)
        for source in range(form.ranks):
            if not self._wire.active[source]:
                continue
            head, loads, slots, *payloads = self._read(self._blobs[buffer_set.index][1][source])
            grid = slots[: int(head[0, 1])].tolist()
            arrivals.loads[source] = loads
            for into, rows in zip(arrivals.payloads, payloads, strict=True):
                into[source] = rows
            self._enter(buffer_set, source, int(head[0, 0]))
            excess = torch.maximum(excess, self._excess(grid))
            self._list(arrivals, source, grid)
        buffer_set.status[status.OVERFLOW] = torch.maximum(
            buffer_set.status[status.OVERFLOW], excess
        )
        buffer_set.status[status.INACTIVE_RANK_HITS] += self._stray(buffer_set)

    def _enter(self, buffer_set: BufferSet, source: int, generation: int) -> None:
        own = int(self._read(self._blobs[buffer_set.index][0][0])[0][0, 0])
        if generation != own:
            words = torch.tensor([1, generation, own])
            buffer_set.status[status.RANK_WORDS_START :].view(-1, 3)[source] = words

    def _list(self, arrivals: ReceivedRows, source: int, grid: list[list[int]]) -> None:
        form = self._form
        hits = list(self._hits(grid, self._wire.rank))
        arrivals.rows_from_rank[source] = len({token for token, _, _ in hits})
        for place, (token, _, slot) in enumerate(hits[: form.result_capacity]):
            entry = source * form.result_capacity + place
            arrivals.entry_slots[entry] = slot % form.slots_per_rank
            arrivals.entry_rows[entry] = source * form.max_tokens + token

    def _excess(self, grid: list[list[int]]) -> Tensor:
        form = self._form
        out = [0, 0]
        for peer in range(form.ranks):
            if self._wire.active[peer]:
                hits = list(self._hits(grid, peer))
                out[0] = max(out[0], len({token for token, _, _ in hits}) - form.capacity)
                out[1] = max(out[1], len(hits) - form.result_capacity)
        return torch.tensor(out)

    def _stray(self, buffer_set: BufferSet) -> int:
        head, _, slots, *_ = self._read(self._blobs[buffer_set.index][0][0])
        grid = slots[: int(head[0, 1])].tolist()
        away = [r for r in range(self._form.ranks) if not self._wire.active[r]]
        return sum(len(list(self._hits(grid, rank))) for rank in away)

    def _take(self, tokens: int, buffer_set: BufferSet) -> None:
        form, blobs = self._form, self._blobs[buffer_set.index]
        grid = self._read(blobs[0][0])[2][:tokens].tolist()
        buffer_set.results[:tokens] = torch.zeros((), dtype=form.result.dtype)
        mine = self._wire.rank * form.result_capacity
        for peer in range(form.ranks):
            if not self._wire.active[peer]:
                continue
            came = _typed(blobs[3][peer], form.max_entries, form.result)
            for place, (token, k, _) in enumerate(self._hits(grid, peer)):
                if place < form.result_capacity:
                    buffer_set.results[token, k] = came[mine + place]

    def _hits(self, grid: list[list[int]], peer: int) -> Iterator[tuple[int, int, int]]:
        """Token, choice and slot of what falls on a rank."""
        for token, slots in enumerate(grid):
            for k, slot in enumerate(slots):
                if 0 <= slot < self._form.num_slots and slot // self._form.slots_per_rank == peer:
                    yield token, k, slot

    def _read(self, blob: Tensor) -> list[Tensor]:
        tensors, start = [], 0
        for count, row in self._parts:
            stop = start + count * row.nbytes
            tensors.append(_typed(blob[start:stop], count, row))
            start = stop
        return tensors

    def _buffer_set(self, number: int, allocate: AllocateBytes) -> BufferSet:
        form = self._form

        def new_tensor(row: RowFormat, *lead: int) -> Tensor:
            whole = allocate(prod(lead) * row.nbytes).view(row.dtype)
            return whole.view(*lead, *row.shape)

        arrivals = ReceivedRows(
            payloads=tuple(new_tensor(row, form.ranks, form.max_tokens) for row in form.payloads),
            entry_rows=new_tensor(RowFormat((), torch.int64), form.max_entries),
            entry_slots=new_tensor(RowFormat((), torch.int32), form.max_entries),
            rows_from_rank=new_tensor(RowFormat((), torch.int32), form.ranks),
            loads=new_tensor(RowFormat((form.experts,), torch.int32), form.ranks),
        )
        status_words = new_tensor(RowFormat((), torch.int64), status.num_words(form.ranks))
        return BufferSet(
            number, arrivals, new_tensor(form.result, form.max_tokens, form.top_k), status_words
        )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _typed(blob: Tensor, count: int, row: RowFormat) -> Tensor:
    """[count, ...], a copy, since the bytes may lie anywhere."""
    return blob.clone().view(row.dtype).view(count, *row.shape)
