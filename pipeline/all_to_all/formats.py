"""Formats of the expert exchange: sizes, dispatch messages, and the batches at both ends.

In a dispatch each rank sends one message to each other rank: header, ids, payload rows.

    generation int64 | rows, rows lost, results lost: int32 each | loads int32 [experts]
    ids int32 [capacity, top_k]
    payload rows, [capacity, ...] each

Every part begins at a multiple of 64 bytes, so that views of any element type are aligned. Column k
of a row's ids is the token's choice k if it falls on the receiving rank, else the invalid id.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from equipoise.hal.errors import ExchangeError

INTEGER_OF_ITEMSIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by element size. Rows are copied as integers, so that every dtype (FP8, say) works
with every copy kernel and no bit changes."""


@dataclass(frozen=True)
class RowFormat:
    """Shape and dtype of one row of a tensor.

    Attributes:
        shape: of the row; () for one element.
        dtype: any whose elements have 1, 2, 4 or 8 bytes.

    Raises:
        ExchangeError: elements have another size.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype.itemsize not in INTEGER_OF_ITEMSIZE:
            raise ExchangeError(f"{self.dtype}: elements of {self.dtype.itemsize} bytes")

    @property
    def nbytes(self) -> int:
        """Size of a row."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def integer_dtype(self) -> torch.dtype:
        """The integer dtype with elements of the same size."""
        return INTEGER_OF_ITEMSIZE[self.dtype.itemsize]


@dataclass(frozen=True)
class ExchangeFormat:
    """Sizes of an exchange; equal on all ranks, and fixed.

    Attributes:
        ranks: ranks of the group.
        slots_per_rank: slots of each rank.
        experts: length of the load histogram that is sent along; 0 for none.
        max_tokens: most tokens of a batch.
        top_k: slots per token.
        payloads: the tensors that have one row per token.
        result: the row that is returned for each (token, choice).
        capacity: most rows from one rank to another. `max_tokens` cannot overflow, since a token's
            row is sent to a rank once, however many of its slots the token chose.
        result_capacity: most results from one rank to another; `max_tokens * top_k` cannot
            overflow.

    Raises:
        ExchangeError: a number is too small.
    """

    ranks: int
    slots_per_rank: int
    experts: int
    max_tokens: int
    top_k: int
    payloads: tuple[RowFormat, ...]
    result: RowFormat
    capacity: int
    result_capacity: int

    def __post_init__(self) -> None:
        if self.experts < 0:
            raise ExchangeError(f"experts: expected 0 or more, got {self.experts}")
        for name in ("ranks", "slots_per_rank", "max_tokens", "top_k", "capacity"):
            self._check(name, getattr(self, name))
        self._check("result_capacity", self.result_capacity)

    @staticmethod
    def without_overflow(
        ranks: int,
        slots_per_rank: int,
        experts: int,
        max_tokens: int,
        top_k: int,
        payloads: Sequence[RowFormat],
        result: RowFormat,
    ) -> "ExchangeFormat":
        """Return a format whose capacities cannot overflow."""
        return ExchangeFormat(
            ranks=ranks,
            slots_per_rank=slots_per_rank,
            experts=experts,
            max_tokens=max_tokens,
            top_k=top_k,
            payloads=tuple(payloads),
            result=result,
            capacity=max_tokens,
            result_capacity=max_tokens * top_k,
        )

    def with_capacities(self, capacity: int, result_capacity: int) -> "ExchangeFormat":
        """Return the same format with other capacities."""
        return replace(self, capacity=capacity, result_capacity=result_capacity)

    @property
    def num_slots(self) -> int:
        """Number of slots of all ranks; also the global id of the invalid slot."""
        return self.ranks * self.slots_per_rank

    @property
    def invalid_slot(self) -> int:
        """The local id of the invalid slot."""
        return self.slots_per_rank

    @property
    def max_entries(self) -> int:
        """Most results that a rank may have to return to all ranks together."""
        return self.ranks * self.result_capacity

    def _check(self, name: str, value: int) -> None:
        if value < 1:
            raise ExchangeError(f"{name}: expected a positive number, got {value}")


def check_rows(what: str, tensor: Tensor, rows: int, row: RowFormat) -> None:
    """Raise `ExchangeError` unless `tensor` has `rows` rows of this format."""
    if tuple(tensor.shape) != (rows, *row.shape) or tensor.dtype != row.dtype:
        raise ExchangeError(
            f"{what}: expected {row.dtype} {[rows, *row.shape]}, "
            f"got {tensor.dtype} {list(tensor.shape)}"
        )


ALIGNMENT = 64
"""Bytes; every part of a message begins at a multiple."""


@dataclass(frozen=True, eq=False)
class DispatchMessages:
    """Views of the dispatch messages to, or from, all ranks.

    Attributes:
        generation: int64 [ranks].
        row_counts: int32 [ranks], number of rows in use.
        overflow: int32 [ranks, 2], rows and results by which the sender's fullest message exceeds
            its capacity; the same in all messages of one sender.
        loads: int32 [ranks, experts].
        ids: int32 [ranks, capacity, top_k].
        payloads: as integers of the element size, [ranks, capacity, ...] each.
    """

    generation: Tensor
    row_counts: Tensor
    overflow: Tensor
    loads: Tensor
    ids: Tensor
    payloads: tuple[Tensor, ...]


class DispatchMessageLayout:
    """Offsets of the parts of a dispatch message."""

    def __init__(self, form: ExchangeFormat) -> None:
        self._form = form
        shapes = [(form.capacity, *row.shape) for row in form.payloads]
        sizes = [
            24 + 4 * form.experts,
            4 * form.capacity * form.top_k,
            *(prod(s) * r.dtype.itemsize for s, r in zip(shapes, form.payloads, strict=True)),
        ]
        self._starts = [0]
        for size in sizes:
            self._starts.append(self._starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)

    @property
    def nbytes(self) -> int:
        """Size of a message."""
        return self._starts[-1]

    def views(self, blob: Tensor) -> DispatchMessages:
        """Return views of the parts of `blob`, uint8 [ranks, nbytes]."""
        form = self._form
        header_words = _part(blob, 8, (4,), torch.int32)
        return DispatchMessages(
            generation=_part(blob, 0, (1,), torch.int64)[:, 0],
            row_counts=header_words[:, 0],
            overflow=header_words[:, 1:3],
            loads=_part(blob, 24, (form.experts,), torch.int32),
            ids=_part(blob, self._starts[1], (form.capacity, form.top_k), torch.int32),
            payloads=tuple(
                _part(blob, start, (form.capacity, *row.shape), row.integer_dtype)
                for start, row in zip(self._starts[2:], form.payloads, strict=False)
            ),
        )


def _part(blob: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a view [ranks, *shape] of the part that begins at byte `start` of each message."""
    stop = start + prod(shape) * dtype.itemsize
    return blob[:, start:stop].view(dtype).view(blob.shape[0], *shape)


GENERATION_FORMAT = RowFormat((), torch.int64)
LOAD_FORMAT = RowFormat((), torch.int32)


@dataclass(frozen=True, eq=False)
class Batch:
    """The tokens of one layer, on the device; read by programs of the stream, not by the host.

    Attributes:
        slots: int32 [n, top_k], global slot ids; any id outside [0, ranks * slots_per_rank) is
            padding, for which nothing is sent.
        payloads: tensors [n, ...], one per row format.
        generation: int64 [1], of the routing tables that `slots` come from.
        loads: int32 [experts], this rank's load histogram.
    """

    slots: Tensor
    payloads: tuple[Tensor, ...]
    generation: Tensor
    loads: Tensor

    @property
    def tokens(self) -> int:
        """Number of tokens, n."""
        return self.slots.shape[0]

    def check(self, form: ExchangeFormat) -> None:
        """Raise `ExchangeError` unless the batch fits the format."""
        if self.tokens > form.max_tokens:
            raise ExchangeError(f"tokens: expected {form.max_tokens} at most, got {self.tokens}")
        check_rows("slots", self.slots, self.tokens, RowFormat((form.top_k,), torch.int32))
        check_rows("generation", self.generation, 1, GENERATION_FORMAT)
        check_rows("loads", self.loads, form.experts, LOAD_FORMAT)
        if len(self.payloads) != len(form.payloads):
            raise ExchangeError(
                f"payloads: expected {len(form.payloads)}, got {len(self.payloads)}"
            )
        for number, (payload, row) in enumerate(zip(self.payloads, form.payloads, strict=True)):
            check_rows(f"payload {number}", payload, self.tokens, row)


@dataclass(frozen=True, eq=False)
class ReceivedRows:
    """The rows that a dispatch received, and the *entries* that this rank has to compute.

    An entry is one (token, choice) of any rank that falls on a slot of this rank. Results are
    returned in the order of the entries. With fixed capacity the entries are ordered by source
    rank, token and choice; those of one source begin at a fixed index, and unused ones are invalid.

    Attributes:
        payloads: tensors [blocks, rows, ...]; rows that were not sent are undefined.
        entry_rows: int64 [entries], block * rows per block + row of each entry; in range even if
            the entry is invalid.
        entry_slots: int32 [entries], local slot of each entry; slots_per_rank if it is invalid.
        rows_from_rank: int32 [ranks], rows received from each rank.
        loads: int32 [ranks, experts], every rank's load histogram.
    """

    payloads: tuple[Tensor, ...]
    entry_rows: Tensor
    entry_slots: Tensor
    rows_from_rank: Tensor
    loads: Tensor

    def gather_payload(self, number: int) -> Tensor:
        """Return payload `number` by entry, [entries, ...]; undefined if the entry is invalid."""
        payload = self.payloads[number]
        each = max(payload.shape[1], 1)
        block = torch.div(self.entry_rows, each, rounding_mode="floor")
        bits = payload.view(INTEGER_OF_ITEMSIZE[payload.dtype.itemsize])
        return bits[block, self.entry_rows % each].view(payload.dtype)
