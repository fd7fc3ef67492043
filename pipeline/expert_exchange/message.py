"""The one message that a rank sends to another in a dispatch: header, ids, payload rows.

    generation int64 | rows, rows lost, results lost: int32 each | loads int32 [experts]
    ids int32 [capacity, top_k]
    payload rows, [capacity, ...] each

Every part begins at a multiple of 64 bytes, so that views of any element type are aligned. The
column of a row's ids says which of the token's choices it is; other columns hold the invalid id.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from equipoise.pipeline.expert_exchange.format import ExchangeFormat

ALIGNMENT = 64
"""Bytes."""


@dataclass(frozen=True, eq=False)
class Messages:
    """Views of the messages to, or from, all ranks.

    Attributes:
        generation: int64 [ranks].
        rows: int32 [ranks], how many of the rows hold something.
        lost: int32 [ranks, 2], by how many rows, and results, the sender exceeded the capacity of
            the fullest of its messages; the same in all messages of a sender.
        loads: int32 [ranks, experts].
        ids: int32 [ranks, capacity, top_k].
        payloads: integers as large as the elements, [ranks, capacity, ...] each.
    """

    generation: Tensor
    rows: Tensor
    lost: Tensor
    loads: Tensor
    ids: Tensor
    payloads: tuple[Tensor, ...]


class MessageLayout:
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

    def views(self, blob: Tensor) -> Messages:
        """The parts of `blob`, uint8 [ranks, nbytes]."""
        form = self._form
        words = _part(blob, 8, (4,), torch.int32)
        return Messages(
            generation=_part(blob, 0, (1,), torch.int64)[:, 0],
            rows=words[:, 0],
            lost=words[:, 1:3],
            loads=_part(blob, 24, (form.experts,), torch.int32),
            ids=_part(blob, self._starts[1], (form.capacity, form.top_k), torch.int32),
            payloads=tuple(
                _part(blob, start, (form.capacity, *row.shape), row.bits)
                for start, row in zip(self._starts[2:], form.payloads, strict=False)
            ),
        )


def _part(blob: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A view [ranks, *shape] of what begins at byte `start` of each message."""
    stop = start + prod(shape) * dtype.itemsize
    return blob[:, start:stop].view(dtype).view(blob.shape[0], *shape)
