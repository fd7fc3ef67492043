"""The reference of `ExchangeKernels`: torch operations, over any communicator."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from equipoise.hal.stream import Stream
from equipoise.hal.work import Work
from equipoise.pipeline.all_to_all import status
from equipoise.pipeline.all_to_all.formats import (
    Batch,
    DispatchMessageLayout,
    DispatchMessages,
    ExchangeFormat,
    ReceivedRows,
)
from equipoise.pipeline.all_to_all.kernels import BufferSet
from equipoise.pipeline.all_to_all.sorting import list_entries, sort_batch
from equipoise.pipeline.all_to_all.transport import AllToAllTransport, active_mask

NUM_BUFFER_SETS = 2
"""One micro-batch travels while the other is computed."""

AllocateBytes = Callable[[int], Tensor]
"""Zeroed device memory for so many bytes, uint8 [n]."""


@dataclass(frozen=True, eq=False)
class _Buffers:
    """What a room has behind what its callers see.

    Attributes:
        row_blobs: uint8 [ranks, bytes of a message], those that go and those that come.
        sent: views of the former.
        received: views of the latter.
        result_blobs: uint8 [ranks, bytes of all results of a pair], those that go and that come.
        result_positions: int64 [max_tokens * top_k], as `SortedBatch.places`.
    """

    row_blobs: tuple[Tensor, Tensor]
    sent: DispatchMessages
    received: DispatchMessages
    result_blobs: tuple[Tensor, Tensor]
    result_positions: Tensor


class TorchKernels:
    """Even messages of fixed size; an accelerator's own kernels are judged by what this does.

    Args:
        form: of the exchange.
        wire: carries the messages.
        allocate: where the buffers come from.
    """

    def __init__(
        self, form: ExchangeFormat, wire: AllToAllTransport, allocate: AllocateBytes
    ) -> None:
        self._form = form
        self._wire = wire
        self._layout = DispatchMessageLayout(form)
        self._buffers = [self._make_buffers(allocate) for _ in range(NUM_BUFFER_SETS)]
        self._buffer_sets = tuple(
            self._make_buffer_set(n, allocate) for n in range(NUM_BUFFER_SETS)
        )
        self._active = active_mask(wire, self._buffer_sets[0].status.device)

    @property
    def buffer_sets(self) -> tuple[BufferSet, ...]:
        """Two."""
        return self._buffer_sets

    def pack_rows(self, batch: Batch, room: BufferSet, stream: Stream) -> None:
        """One message for each rank, header and all."""
        stream.launch(partial(self._pack_rows, batch, room))

    def send_rows(self, room: BufferSet, stream: Stream) -> Work:
        """On the wire."""
        source, into = self._buffers[room.index].row_blobs
        return self._wire.all_to_all(into, source, stream)

    def unpack_rows(self, room: BufferSet, stream: Stream) -> None:
        """List the entries; payloads, counts and loads are read where they came."""
        stream.launch(partial(self._unpack_rows, room))

    def pack_results(self, rows: Tensor, room: BufferSet, stream: Stream) -> None:
        """Copy."""
        stream.launch(partial(self._pack_results, rows, room))

    def send_results(self, room: BufferSet, stream: Stream) -> Work:
        """On the wire."""
        source, into = self._buffers[room.index].result_blobs
        return self._wire.all_to_all(into, source, stream)

    def unpack_results(self, tokens: int, room: BufferSet, stream: Stream) -> None:
        """Gather."""
        stream.launch(partial(self._unpack_results, tokens, room))

    def _pack_rows(self, batch: Batch, room: BufferSet) -> None:
        form, buffers = self._form, self._buffers[room.index]
        into, found = buffers.sent, sort_batch(batch.slots, form, self._active)
        into.generation.copy_(batch.generation.expand(form.ranks))
        into.row_counts.copy_(found.rows)
        into.overflow.copy_(found.overflow.expand(form.ranks, 2))
        into.loads.copy_(batch.loads.expand(form.ranks, -1))
        ranks = torch.arange(form.ranks, device=found.tokens.device)
        into.ids.copy_(found.choices[found.tokens, ranks[:, None]])
        if batch.tokens:  # of none nothing can be gathered, and the ids say that there are none
            tokens = found.tokens.clamp(max=batch.tokens - 1).view(-1)
            for part, payload, row in zip(
                into.payloads, batch.payloads, form.payloads, strict=True
            ):
                part.copy_(payload.view(row.integer_dtype).index_select(0, tokens).view(part.shape))
        buffers.result_positions[: found.result_positions.numel()].copy_(found.result_positions)
        room.status[status.INACTIVE_RANK_HITS] += found.inactive_rank_hits

    def _unpack_rows(self, room: BufferSet) -> None:
        buffers = self._buffers[room.index]
        active = self._active[: self._form.ranks]
        rows, slots = list_entries(buffers.received.ids, active, self._form)
        room.received.entry_rows.copy_(rows)
        room.received.entry_slots.copy_(slots)
        own = buffers.sent.generation[self._wire.rank]
        status.merge_headers(room.status, buffers.received, own, active)

    def _pack_results(self, rows: Tensor, room: BufferSet) -> None:
        into = self._results(self._buffers[room.index].result_blobs[0])
        into.copy_(rows.view(self._form.result.integer_dtype))

    def _unpack_results(self, tokens: int, room: BufferSet) -> None:
        form, buffers = self._form, self._buffers[room.index]
        places = buffers.result_positions[: tokens * form.top_k]
        came = self._results(buffers.result_blobs[1])
        found = came.index_select(0, places.clamp(max=form.max_entries - 1))
        nothing = (places == form.max_entries).view(-1, *[1] * len(form.result.shape))
        out = room.results[:tokens].view(form.result.integer_dtype)
        out.copy_(found.masked_fill_(nothing, 0).view(out.shape))

    def _results(self, blob: Tensor) -> Tensor:
        """The rows of `blob`, as integers [entries, ...]."""
        row = self._form.result
        return blob.view(-1).view(row.integer_dtype).view(self._form.max_entries, *row.shape)

    def _make_buffers(self, allocate: AllocateBytes) -> _Buffers:
        form = self._form
        messages, results = self._layout.nbytes, form.result_capacity * form.result.nbytes
        going, coming, back_out, back_in = (
            allocate(form.ranks * each).view(form.ranks, each)
            for each in (messages, messages, results, results)
        )
        places = allocate(8 * form.max_tokens * form.top_k).view(torch.int64)
        return _Buffers(
            (going, coming),
            self._layout.views(going),
            self._layout.views(coming),
            (back_out, back_in),
            places,
        )

    def _make_buffer_set(self, number: int, allocate: AllocateBytes) -> BufferSet:
        form, came = self._form, self._buffers[number].received
        shape = (form.max_tokens, form.top_k, *form.result.shape)
        results = allocate(prod(shape) * form.result.dtype.itemsize)
        return BufferSet(
            index=number,
            received=ReceivedRows(
                payloads=tuple(
                    bits.view(row.dtype)
                    for bits, row in zip(came.payloads, form.payloads, strict=True)
                ),
                entry_rows=allocate(8 * form.max_entries).view(torch.int64),
                entry_slots=allocate(4 * form.max_entries).view(torch.int32),
                rows_from_rank=came.row_counts,
                loads=came.loads,
            ),
            results=results.view(form.result.dtype).view(shape),
            status=allocate(8 * status.num_words(form.ranks)).view(torch.int64),
        )


def device_allocator(device: torch.device) -> AllocateBytes:
    """Of `device`; zeroed on the host, since a device would do it on the current stream."""
    return lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8).to(device)
