"""Where each row of a batch belongs: worked out once per forward, used by every layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.demo.model.cache import SLOT_BLOCK, KVCache
from equipoise.demo.model.config import Batch, Sequence


@dataclass(frozen=True)
class Span:
    """A prefill sequence: rows `first` to `first + length` of the batch, `start` its position."""

    slot: int
    first: int
    length: int
    start: int


@dataclass(frozen=True)
class RowPlan:
    """Row -> token, slot, position, all (N,) int64 where the cache is; prefill spans come first.

    `decode_first` is the first decode row; `decode_blocks` are the blocks of `SLOT_BLOCK` slots
    that hold a decode request.
    """

    tokens: Tensor
    slots: Tensor
    positions: Tensor
    spans: tuple[Span, ...]
    decode_first: int
    decode_blocks: tuple[int, ...]

    @property
    def rows(self) -> int:
        """N, the rows of the batch without padding."""
        return self.tokens.shape[0]


def plan_rows(batch: Batch, cache: KVCache) -> RowPlan:
    """The plan of one forward; ValueError for a slot or position outside the cache."""
    for sequence in batch:
        _check(sequence, cache)
    spans, first = [], 0
    for sequence in batch.prefill:
        spans.append(Span(sequence.slot, first, len(sequence.tokens), sequence.start))
        first += len(sequence.tokens)
    lengths = torch.tensor([len(s.tokens) for s in batch], dtype=torch.int64)
    begins = torch.tensor([s.start for s in batch], dtype=torch.int64)
    within = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(
        lengths
    )
    slots = torch.tensor([s.slot for s in batch], dtype=torch.int64)
    return RowPlan(
        tokens=_tokens(batch).to(cache.device),
        slots=slots.repeat_interleave(lengths).to(cache.device),
        positions=(begins.repeat_interleave(lengths) + within).to(cache.device),
        spans=tuple(spans),
        decode_first=first,
        decode_blocks=tuple(sorted({s.slot // SLOT_BLOCK for s in batch.decode})),
    )


def _tokens(batch: Batch) -> Tensor:
    if not batch.rows:
        return torch.zeros(0, dtype=torch.int64)
    return torch.cat([sequence.tokens for sequence in batch]).to(torch.int64)


def _check(sequence: Sequence, cache: KVCache) -> None:
    if not 0 <= sequence.slot < cache.slots:
        raise ValueError(f"slot {sequence.slot} is outside the cache of {cache.slots} slots")
    stop = sequence.start + len(sequence.tokens)
    if sequence.start < 0 or stop > cache.config.context:
        raise ValueError(
            f"positions {sequence.start} to {stop} of slot {sequence.slot} are outside the "
            f"context of {cache.config.context}"
        )
