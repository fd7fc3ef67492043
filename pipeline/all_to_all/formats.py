"""What an exchange carries: how many rows of which kind between how many ranks.

The one message that a rank sends to another in a dispatch: header, ids, payload rows.

    generation int64 | rows, rows lost, results lost: int32 each | loads int32 [experts]
    ids int32 [capacity, top_k]
    payload rows, [capacity, ...] each

Every part begins at a multiple of 64 bytes, so that views of any element type are aligned. The
column of a row's ids says which of the token's choices it is; other columns hold the invalid id.

What a rank brings to one exchange.

What a dispatch brought.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from equipoise.hal.errors import ExchangeError

INTEGER_OF_ITEMSIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by the bytes of an element: as these every element type is gathered and copied."""


@dataclass(frozen=True)
class RowFormat:
    """A row of one tensor.

    Attributes:
        shape: of the row; () for one element.
        dtype: any whose elements have 1, 2, 4 or 8 bytes.

    Raises:
        ExchangeError: elements of another size.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype.itemsize not in INTEGER_OF_ITEMSIZE:
            raise ExchangeError(f"{self.dtype}: elements of {self.dtype.itemsize} bytes")

    @property
    def nbytes(self) -> int:
        """Of a row."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def integer_dtype(self) -> torch.dtype:
        """The integer that is as large as an element."""
        return INTEGER_OF_ITEMSIZE[self.dtype.itemsize]


@dataclass(frozen=True)
class ExchangeFormat:
    """What is the same on every rank of an exchange, from its making to its end.

    Attributes:
        ranks: of the group.
        slots_per_rank: physical slots of each rank.
        experts: of the load histogram that rides along; 0 for none.
        max_tokens: tokens of a batch at most.
        top_k: slots a token.
        payloads: the tensors of which each token has a row.
        result: what comes back for each (token, choice).
        capacity: rows from one rank to one other; `max_tokens` cannot overflow, since a token's row
            travels once to a rank, whatever it chose there.
        result_capacity: results from one rank to one other; `max_tokens * top_k` cannot overflow.

    Raises:
        ExchangeError: a number that is too small.
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
        """Capacities that cannot overflow."""
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
        """The same with other capacities."""
        return replace(self, capacity=capacity, result_capacity=result_capacity)

    @property
    def num_slots(self) -> int:
        """Of all ranks; also the global id of the invalid slot."""
        return self.ranks * self.slots_per_rank

    @property
    def invalid_slot(self) -> int:
        """The local id of the invalid slot."""
        return self.slots_per_rank

    @property
    def max_entries(self) -> int:
        """Results that a rank may owe to all ranks together."""
        return self.ranks * self.result_capacity

    def _check(self, name: str, value: int) -> None:
        if value < 1:
            raise ExchangeError(f"{name}: expected a positive number, got {value}")


def check_rows(what: str, tensor: Tensor, rows: int, row: RowFormat) -> None:
    """Raise `ExchangeError` unless `tensor` has so many such rows."""
    if tuple(tensor.shape) != (rows, *row.shape) or tensor.dtype != row.dtype:
        raise ExchangeError(
            f"{what}: expected {row.dtype} {[rows, *row.shape]}, "
            f"got {tensor.dtype} {list(tensor.shape)}"
        )


ALIGNMENT = 64
"""Bytes."""


@dataclass(frozen=True, eq=False)
class DispatchMessages:
    """Views of the messages to, or from, all ranks.

    Attributes:
        generation: int64 [ranks].
        row_counts: int32 [ranks], how many of the rows hold something.
        overflow: int32 [ranks, 2], by how many rows, and results, the sender exceeded the capacity of
            the fullest of its messages; the same in all messages of a sender.
        loads: int32 [ranks, experts].
        ids: int32 [ranks, capacity, top_k].
        payloads: integers as large as the elements, [ranks, capacity, ...] each.
    """

    generation: Tensor
    row_counts: Tensor
    overflow: Tensor
    loads: Tensor
    ids: Tensor
    payloads: tuple[Tensor, ...]


class DispatchMessageLayout:
    """Where what lies in a message."""

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
        """Of a message."""
        return self._starts[-1]

    def views(self, blob: Tensor) -> DispatchMessages:
        """The parts of `blob`, uint8 [ranks, nbytes]."""
        form = self._form
        words = _part(blob, 8, (4,), torch.int32)
        return DispatchMessages(
            generation=_part(blob, 0, (1,), torch.int64)[:, 0],
            row_counts=words[:, 0],
            overflow=words[:, 1:3],
            loads=_part(blob, 24, (form.experts,), torch.int32),
            ids=_part(blob, self._starts[1], (form.capacity, form.top_k), torch.int32),
            payloads=tuple(
                _part(blob, start, (form.capacity, *row.shape), row.integer_dtype)
                for start, row in zip(self._starts[2:], form.payloads, strict=False)
            ),
        )


def _part(blob: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A view [ranks, *shape] of what begins at byte `start` of each message."""
    stop = start + prod(shape) * dtype.itemsize
    return blob[:, start:stop].view(dtype).view(blob.shape[0], *shape)


GENERATION_FORMAT = RowFormat((), torch.int64)
LOAD_FORMAT = RowFormat((), torch.int32)


@dataclass(frozen=True, eq=False)
class Batch:
    """The tokens of one layer, on the device; read when the stream comes to it, not before.

    Attributes:
        slots: int32 [n, top_k], global slot ids; any id outside [0, ranks x slots_per_rank) is
            padding, of which nothing travels.
        payloads: tensors [n, ...], as the format says.
        generation: int64 [1], of the routing tables that made `slots`.
        loads: int32 [experts], this rank's histogram.
    """

    slots: Tensor
    payloads: tuple[Tensor, ...]
    generation: Tensor
    loads: Tensor

    @property
    def tokens(self) -> int:
        """How many, n."""
        return self.slots.shape[0]

    def check(self, form: ExchangeFormat) -> None:
        """Raise `ExchangeError` unless it fits."""
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
    """Rows that came, and the *entries*: what this rank's experts have to compute of them.

    An entry is one (token, choice) of some rank that fell on a slot of this rank. Results go back
    in the order of the entries. In the exchange of fixed capacity they stand by source rank, then
    by token, then by choice; those of source s begin at a fixed place, and where there are fewer
    than fit the rest are invalid.

    Attributes:
        payloads: tensors [blocks, rows, ...]; rows that nothing was sent for are undefined.
        entry_rows: int64 [entries], block x rows a block + row of each entry; in range, also where the
            entry is invalid.
        entry_slots: int32 [entries], local slot of each entry; slots_per_rank where it is invalid.
        rows_from_rank: int32 [ranks], rows that came from each rank.
        loads: int32 [ranks, experts], every rank's histogram.
    """

    payloads: tuple[Tensor, ...]
    entry_rows: Tensor
    entry_slots: Tensor
    rows_from_rank: Tensor
    loads: Tensor

    def gather_payload(self, number: int) -> Tensor:
        """Payload `number` by entry, [entries, ...]; undefined where the entry is invalid."""
        payload = self.payloads[number]
        each = max(payload.shape[1], 1)
        block = torch.div(self.entry_rows, each, rounding_mode="floor")
        bits = payload.view(INTEGER_OF_ITEMSIZE[payload.dtype.itemsize])
        return bits[block, self.entry_rows % each].view(payload.dtype)
