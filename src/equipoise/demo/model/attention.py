"""Causal attention whose shapes depend on one request alone, never on its company.

Keys and values are always taken over the whole context and masked, so the sums have one length;
a prefill sequence is one product per head; decode requests are taken by fixed blocks of
neighbouring cache slots, each query padded to `ROW_MULTIPLE` rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.demo.model.cache import SLOT_BLOCK, KVCache
from equipoise.demo.model.plan import RowPlan, Span
from equipoise.demo.model.rows import ROW_MULTIPLE, pad_rows, padded_count


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


def _prefill(layer: int, query: Tensor, span: Span, cache: KVCache) -> Tensor:
    rows = pad_rows(query[span.first : span.first + span.length]).transpose(0, 1).contiguous()
    scores = torch.bmm(rows, cache.keys[layer][span.slot])
    end = span.start + padded_count(span.length)
    last = torch.arange(span.start, end, device=query.device)
    weights = _masked_softmax(scores, last)
    read = torch.bmm(weights, cache.values[layer][span.slot])
    return read[:, : span.length].transpose(0, 1).flatten(1)


def _decode(layer: int, query: Tensor, plan: RowPlan, cache: KVCache) -> Tensor:
    slots = plan.slots[plan.decode_first :]
    spread = query.new_zeros(cache.slots, *query.shape[1:])
    spread[slots] = query
    # The places of idle slots read whatever lies there, all finite, and are thrown away.
    last = torch.zeros(cache.slots, dtype=torch.int64, device=query.device)
    last[slots] = plan.positions[plan.decode_first :]
    read = torch.zeros_like(spread)
    for block in plan.decode_blocks:
        here = slice(block * SLOT_BLOCK, (block + 1) * SLOT_BLOCK)
        scores = _by_block(spread[here], cache.keys[layer][here])
        weights = _masked_softmax(scores, last[here, None])
        read[here] = _by_block(weights, cache.values[layer][here])
    return read[slots].flatten(1)


def _by_block(rows: Tensor, right: Tensor) -> Tensor:
    """(slots, heads, in) x (slots, heads, in, out) -> (slots, heads, out), one padded row each."""
    padded = F.pad(rows.flatten(0, 1)[:, None], (0, 0, 0, ROW_MULTIPLE - 1))
    return torch.bmm(padded, right.flatten(0, 1))[:, 0].view(*rows.shape[:2], -1)


def _masked_softmax(scores: Tensor, last: Tensor) -> Tensor:
    """Softmax over the positions up to `last`, which broadcasts over all but the positions."""
    hidden = torch.arange(scores.shape[-1], device=scores.device) > last[..., None]
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
