"""Other engines' rules as operators of the device, bit for bit `equipoise.hal.routing_rules`.

As in `routing`: no size is read back, no boolean picks elements, and every scalar goes into the
operator as an argument.
"""

import torch
from torch import Tensor

from equipoise.backends.ascend.routing import pick, strays
from equipoise.hal.routing import MASK32, RoutingTable
from equipoise.hal.routing_rules import BLOCK, KNUTH32


def by_row(ids: Tensor, table: RoutingTable, top_k: int) -> Tensor:
    """Slots, int32 [n], by the hash of each row."""
    return _take(ids, table, (_numbers(ids, top_k) * KNUTH32) & MASK32)


def by_turn(ids: Tensor, table: RoutingTable, offset: int) -> Tensor:
    """Slots, int32 [n], by turns within blocks."""
    turns = _earlier(ids, table.experts) + _numbers(ids, BLOCK) + offset
    return _take(ids, table, turns)


def first_rows(ids: Tensor, top_k: int, rows: Tensor, experts: int) -> Tensor:
    """`ids` of which those behind the first `rows` rows, int32 [1], are made padding."""
    return ids.masked_fill(_numbers(ids, top_k) >= rows, experts)


def _numbers(ids: Tensor, size: int) -> Tensor:
    """The number of the group of `size` that each element stands in, int64 [n]."""
    groups = torch.arange(-(-ids.numel() // size), device=ids.device)
    return groups[:, None].expand(-1, size).reshape(-1)[: ids.numel()]


def _earlier(ids: Tensor, experts: int) -> Tensor:
    """How many elements of the same block and kind come before each, int64 [n]."""
    blocks = -(-ids.numel() // BLOCK)
    kinds = torch.full((blocks * BLOCK,), experts, dtype=torch.int64, device=ids.device)
    kinds[: ids.numel()].copy_(ids.masked_fill(strays(ids, experts), experts))
    # As float32, which is exact here: the device sorts no integers but on its own processors.
    order = torch.argsort(kinds.view(blocks, BLOCK).float(), dim=1, stable=True)
    # Sorted within its block, an element's place is its turn plus what stands before its kind.
    firsts = _firsts(kinds, blocks, experts)
    places = torch.arange(BLOCK, device=ids.device).expand(blocks, BLOCK)
    place = torch.zeros_like(order).scatter_(1, order, places)
    return (place.view(-1) - firsts)[: ids.numel()]


def _firsts(kinds: Tensor, blocks: int, experts: int) -> Tensor:
    """How many elements of its block are of a lower kind than each, int64 [blocks * BLOCK]."""
    keys = kinds + _numbers(kinds, BLOCK) * (experts + 1)
    counted = torch.zeros(blocks * (experts + 1), dtype=torch.int32, device=kinds.device)
    counted.scatter_add_(0, keys, torch.ones_like(kinds, dtype=torch.int32))
    table = counted.view(blocks, experts + 1).long()
    return (table.cumsum(1) - table).view(-1).index_select(0, keys)


def _take(ids: Tensor, table: RoutingTable, turns: Tensor) -> Tensor:
    """Of each element's run the entry that its turn, int64 [n], comes to."""
    kinds = ids.masked_fill(strays(ids, table.experts), 0).long()
    start = table.start.long()
    # A table that was never committed has runs of no length.
    copies = (start[1:] - start[:-1]).clamp(min=1).index_select(0, kinds)
    # No turn is negative, and torch_npu's `remainder` warns of a format that nobody asked for.
    return pick(ids, table, start.index_select(0, kinds) + torch.fmod(turns, copies))
