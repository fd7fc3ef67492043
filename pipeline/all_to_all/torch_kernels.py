"""Reference implementation of `ExchangeKernels`: torch operations, over any communicator."""

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
"""Two: one micro-batch is sent while the other is computed."""

AllocateBytes = Callable[[int], Tensor]
"""Returns zeroed device memory, uint8 [n], for n bytes."""


@dataclass(frozen=True, eq=False)
class _Buffers:
    """The internal buffers of a buffer set.

    Attributes:
        row_blobs: dispatch messages, uint8 [ranks, bytes of a message]: sent and received.
        sent: views of the sent messages.
        received: views of the received messages.
        result_blobs: results, uint8 [ranks, bytes of all results of a pair]: sent and received.
        result_positions: int64 [max_tokens * top_k], as in `SortedBatch`.
    """

    row_blobs: tuple[Tensor, Tensor]
    sent: DispatchMessages
    received: DispatchMessages
    result_blobs: tuple[Tensor, Tensor]
    result_positions: Tensor


class TorchKernels:
    """Messages of one fixed size; an accelerator's own kernels are tested against this class.

    Args:
        form: of the exchange.
        transport: sends the messages.
        allocate: allocates the buffers.
    """

    def __init__(
        self, form: ExchangeFormat, transport: AllToAllTransport, allocate: AllocateBytes
    ) -> None:
        self._form = form
        self._transport = transport
        self._layout = DispatchMessageLayout(form)
        self._buffers = [self._make_buffers(allocate) for _ in range(NUM_BUFFER_SETS)]
        self._buffer_sets = tuple(
            self._make_buffer_set(n, allocate) for n in range(NUM_BUFFER_SETS)
        )
        self._active = active_mask(transport, self._buffer_sets[0].status.device)

    @property
    def buffer_sets(self) -> tuple[BufferSet, ...]:
        """Two: see `NUM_BUFFER_SETS`."""
        return self._buffer_sets

    def pack_rows(self, batch: Batch, buffer_set: BufferSet, stream: Stream) -> None:
        """Pack one message per rank, header included."""
        stream.launch(partial(self._pack_rows, batch, buffer_set))

    def send_rows(self, buffer_set: BufferSet, stream: Stream) -> Work:
        """All-to-all of the dispatch messages."""
        source, into = self._buffers[buffer_set.index].row_blobs
        return self._transport.all_to_all(into, source, stream)

    def unpack_rows(self, buffer_set: BufferSet, stream: Stream) -> None:
        """List the entries; payloads, counts and loads are views of the received messages."""
        stream.launch(partial(self._unpack_rows, buffer_set))

    def pack_results(self, rows: Tensor, buffer_set: BufferSet, stream: Stream) -> None:
        """Copy the results into the send buffer."""
        stream.launch(partial(self._pack_results, rows, buffer_set))

    def send_results(self, buffer_set: BufferSet, stream: Stream) -> Work:
        """All-to-all of the results."""
        source, into = self._buffers[buffer_set.index].result_blobs
        return self._transport.all_to_all(into, source, stream)

    def unpack_results(self, tokens: int, buffer_set: BufferSet, stream: Stream) -> None:
        """Gather the received results by token and choice."""
        stream.launch(partial(self._unpack_results, tokens, buffer_set))

    def _pack_rows(self, batch: Batch, buffer_set: BufferSet) -> None:
        form, buffers = self._form, self._buffers[buffer_set.index]
        messages, sorted_batch = buffers.sent, sort_batch(batch.slots, form, self._active)
        messages.generation.copy_(batch.generation.expand(form.ranks))
        messages.row_counts.copy_(sorted_batch.rows)
        messages.overflow.copy_(sorted_batch.overflow.expand(form.ranks, 2))
        messages.loads.copy_(batch.loads.expand(form.ranks, -1))
        ranks = torch.arange(form.ranks, device=sorted_batch.tokens.device)
        messages.ids.copy_(sorted_batch.choices[sorted_batch.tokens, ranks[:, None]])
        if batch.tokens:  # an empty tensor cannot be gathered from; the ids are all invalid then
            tokens = sorted_batch.tokens.clamp(max=batch.tokens - 1).view(-1)
            for target, payload, row in zip(
                messages.payloads, batch.payloads, form.payloads, strict=True
            ):
                target.copy_(
                    payload.view(row.integer_dtype).index_select(0, tokens).view(target.shape)
                )
        buffers.result_positions[: sorted_batch.result_positions.numel()].copy_(
            sorted_batch.result_positions
        )
        buffer_set.status[status.INACTIVE_RANK_HITS] += sorted_batch.inactive_rank_hits

    def _unpack_rows(self, buffer_set: BufferSet) -> None:
        buffers = self._buffers[buffer_set.index]
        active = self._active[: self._form.ranks]
        rows, slots = list_entries(buffers.received.ids, active, self._form)
        buffer_set.received.entry_rows.copy_(rows)
        buffer_set.received.entry_slots.copy_(slots)
        own = buffers.sent.generation[self._transport.rank]
        status.merge_headers(buffer_set.status, buffers.received, own, active)

    def _pack_results(self, rows: Tensor, buffer_set: BufferSet) -> None:
        into = self._results(self._buffers[buffer_set.index].result_blobs[0])
        into.copy_(rows.view(self._form.result.integer_dtype))

    def _unpack_results(self, tokens: int, buffer_set: BufferSet) -> None:
        form, buffers = self._form, self._buffers[buffer_set.index]
        positions = buffers.result_positions[: tokens * form.top_k]
        result_rows = self._results(buffers.result_blobs[1])
        results = result_rows.index_select(0, positions.clamp(max=form.max_entries - 1))
        missing = (positions == form.max_entries).view(-1, *[1] * len(form.result.shape))
        out = buffer_set.results[:tokens].view(form.result.integer_dtype)
        out.copy_(results.masked_fill_(missing, 0).view(out.shape))

    def _results(self, blob: Tensor) -> Tensor:
        """Return the rows of `blob` as integers [entries, ...]."""
        row = self._form.result
        return blob.view(-1).view(row.integer_dtype).view(self._form.max_entries, *row.shape)

    def _make_buffers(self, allocate: AllocateBytes) -> _Buffers:
        form = self._form
        messages, results = self._layout.nbytes, form.result_capacity * form.result.nbytes
        sent_rows, received_rows, sent_results, received_results = (
            allocate(form.ranks * nbytes).view(form.ranks, nbytes)
            for nbytes in (messages, messages, results, results)
        )
        positions = allocate(8 * form.max_tokens * form.top_k).view(torch.int64)
        return _Buffers(
            (sent_rows, received_rows),
            self._layout.views(sent_rows),
            self._layout.views(received_rows),
            (sent_results, received_results),
            positions,
        )

    def _make_buffer_set(self, number: int, allocate: AllocateBytes) -> BufferSet:
        form, recv_buffers = self._form, self._buffers[number].received
        shape = (form.max_tokens, form.top_k, *form.result.shape)
        results = allocate(prod(shape) * form.result.dtype.itemsize)
        return BufferSet(
            index=number,
            received=ReceivedRows(
                payloads=tuple(
                    bits.view(row.dtype)
                    for bits, row in zip(recv_buffers.payloads, form.payloads, strict=True)
                ),
                entry_rows=allocate(8 * form.max_entries).view(torch.int64),
                entry_slots=allocate(4 * form.max_entries).view(torch.int32),
                rows_from_rank=recv_buffers.row_counts,
                loads=recv_buffers.loads,
            ),
            results=results.view(form.result.dtype).view(shape),
            status=allocate(8 * status.num_words(form.ranks)).view(torch.int64),
        )


def device_allocator(device: torch.device) -> AllocateBytes:
    """Return an allocator for `device`.

    Memory is zeroed on the host, since a device would do it on whatever stream is current.
    """
    return lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8).to(device)
