"""Causal attention whose shapes depend on one request alone, never on the rest of the batch.

Keys and values are taken over the whole context and masked, so that all sums have one length. A
prefill sequence is one product per head; decode requests are taken by fixed blocks of neighbouring
cache slots, each query padded to `ROW_MULTIPLE` rows. Where each row of a batch belongs is computed
once per forward and used by every layer.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.demo.model.config import Batch, Sequence
from equipoise.demo.model.kv_cache import SLOT_BLOCK, KVCache
from equipoise.demo.model.rows import ROW_MULTIPLE, pad_rows, padded_count


@dataclass(frozen=True)
class PrefillSpan:
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
    spans: tuple[PrefillSpan, ...]
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
        spans.append(PrefillSpan(sequence.slot, first, len(sequence.tokens), sequence.start))
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


def attend(layer: int, qkv: Tensor, plan: RowPlan, cache: KVCache) -> Tensor:
    """Write keys and values of the rows, and return what each row's query reads.

    `qkv` (3, N, heads, head_width) float32, rotated -> (N, hidden) float32.
    """
    query, key, value = qkv
    _write(layer, key, value, plan, cache)
    query = query * cache.config.head_width**-0.5
    parts = [_prefill(layer, query, span, cache) for span in plan.spans]
    if plan.decode_blocks:
        parts.append(_decode(layer, query[plan.decode_first :], plan, cache))
    return torch.cat(parts) if parts else query.flatten(1)


def _write(layer: int, key: Tensor, value: Tensor, plan: RowPlan, cache: KVCache) -> None:
    keys, values = cache.keys[layer], cache.values[layer]
    for span in plan.spans:
        rows = slice(span.first, span.first + span.length)
        places = slice(span.start, span.start + span.length)
        keys[span.slot, :, :, places] = key[rows].permute(1, 2, 0)
        values[span.slot, :, places] = value[rows].transpose(0, 1)
    slots, positions = plan.slots[plan.decode_first :], plan.positions[plan.decode_first :]
    keys[slots, :, :, positions] = key[plan.decode_first :]
    values[slots, :, positions] = value[plan.decode_first :]


def _prefill(layer: int, query: Tensor, span: PrefillSpan, cache: KVCache) -> Tensor:
    rows = pad_rows(query[span.first : span.first + span.length]).transpose(0, 1).contiguous()
    scores = torch.bmm(rows, cache.keys[layer][span.slot])
    end = span.start + padded_count(span.length)
    last = torch.arange(span.start, end, device=query.device)
    weights = _masked_softmax(scores, last)
    output = torch.bmm(weights, cache.values[layer][span.slot])
    return output[:, : span.length].transpose(0, 1).flatten(1)


def _decode(layer: int, query: Tensor, plan: RowPlan, cache: KVCache) -> Tensor:
    slots = plan.slots[plan.decode_first :]
    spread = query.new_zeros(cache.slots, *query.shape[1:])
    spread[slots] = query
    # The places of idle slots read whatever lies there, all finite, and are thrown away.
    last = torch.zeros(cache.slots, dtype=torch.int64, device=query.device)
    last[slots] = plan.positions[plan.decode_first :]
    output = torch.zeros_like(spread)
    for block in plan.decode_blocks:
        here = slice(block * SLOT_BLOCK, (block + 1) * SLOT_BLOCK)
        scores = _by_block(spread[here], cache.keys[layer][here])
        weights = _masked_softmax(scores, last[here, None])
        output[here] = _by_block(weights, cache.values[layer][here])
    return output[slots].flatten(1)


def _by_block(rows: Tensor, right: Tensor) -> Tensor:
    """(slots, heads, in) x (slots, heads, in, out) -> (slots, heads, out), one padded row each."""
    row_block = F.pad(rows.flatten(0, 1)[:, None], (0, 0, 0, ROW_MULTIPLE - 1))
    return torch.bmm(row_block, right.flatten(0, 1))[:, 0].view(*rows.shape[:2], -1)


def _masked_softmax(scores: Tensor, last: Tensor) -> Tensor:
    """Softmax over the positions up to `last`, which broadcasts over all but the positions."""
    hidden = torch.arange(scores.shape[-1], device=scores.device) > last[..., None]
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
