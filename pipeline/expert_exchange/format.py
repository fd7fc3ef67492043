"""What an exchange carries: how many rows of which kind between how many ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from equipoise.hal.errors import ExchangeError

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
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
        if self.dtype.itemsize not in BITS:
            raise ExchangeError(f"{self.dtype}: elements of {self.dtype.itemsize} bytes")

    @property
    def nbytes(self) -> int:
        """Of a row."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def bits(self) -> torch.dtype:
        """The integer that is as large as an element."""
        return BITS[self.dtype.itemsize]


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
    def ample(
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

    def limited(self, capacity: int, result_capacity: int) -> "ExchangeFormat":
        """The same with other capacities."""
        return replace(self, capacity=capacity, result_capacity=result_capacity)

    @property
    def slots(self) -> int:
        """Of all ranks; also the global id of the invalid slot."""
        return self.ranks * self.slots_per_rank

    @property
    def invalid(self) -> int:
        """The local id of the invalid slot."""
        return self.slots_per_rank

    @property
    def entries(self) -> int:
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
