"""Other engines' rules as operators of the device, bit for bit `equipoise.hal.routing_rules`.

As in `routing`: no size is read back, no boolean picks elements, and every scalar goes into the
operator as an argument.
"""

import torch
from torch import Tensor

from equipoise.backends.ascend.replica_tables import ReplicaTables
from equipoise.backends.ascend.routing import count, kinds, live_word, pick, strays
from equipoise.hal.routing import RoutingTable
from equipoise.hal.routing_rules import BLOCK


def by_row(ids: Tensor, turns: Tensor, tables: ReplicaTables, layer: int, slots: Tensor) -> Tensor:
    """Write to `slots`, int32 [n], those of each row's turn: 8 launches.

    Args:
        ids: int32 [n], expert ids.
        turns: int32 or int64 [n], of each element's row.
        tables: of all layers.
        layer: that is routed.
        slots: written.

    Returns:
        The kinds, int32 [n].
    """
    found = kinds(ids, tables.experts)
    columns = torch.addcmul(tables.padding, found, live_word(tables, 1, layer))
    first, copies = torch.index_select(tables.runs[layer], 1, columns)
    # No turn is negative, and torch_npu's `remainder` warns of a format that nobody asked for.
    entries = torch.fmod(turns, copies).add_(first)
    torch.index_select(tables.slots[layer], 0, entries, out=slots)
    return found


def count_rows(found: Tensor, numbers: Tensor, rows: Tensor, counts: Tensor) -> None:
    """Count `found`, kinds int32 [n], of the first `rows` rows, int32 [1]: 3 launches.

    Args:
        found: overwritten.
        numbers: int32 [n], each element's row.
        rows: how many are counted.
        counts: int32 [experts], written.
    """
    counted = torch.gt(rows, numbers, out=torch.empty_like(numbers))
    count(found.mul_(counted), counts, first=1)


def by_turn(ids: Tensor, table: RoutingTable, offset: int) -> Tensor:
    """Slots, int32 [n], by turns within blocks."""
    turns = _earlier(ids, table.experts) + _numbers(ids, BLOCK) + offset
    return _take(ids, table, turns)


def _numbers(ids: Tensor, size: int) -> Tensor:
    """The number of the group of `size` that each element stands in, int64 [n]."""
    groups = torch.arange(-(-ids.numel() // size), device=ids.device)
    return groups[:, None].expand(-1, size).reshape(-1)[: ids.numel()]


def _earlier(ids: Tensor, experts: int) -> Tensor:
    """How many elements of the same block and kind come before each, int64 [n]."""
    blocks = -(-ids.numel() // BLOCK)
    held = torch.full((blocks * BLOCK,), experts, dtype=torch.int64, device=ids.device)
    held[: ids.numel()].copy_(ids.masked_fill(strays(ids, experts), experts))
    # As float32, which is exact here: the device sorts no integers but on its own processors.
    order = torch.argsort(held.view(blocks, BLOCK).float(), dim=1, stable=True)
    # Sorted within its block, an element's place is its turn plus what stands before its kind.
    firsts = _firsts(held, blocks, experts)
    places = torch.arange(BLOCK, device=ids.device).expand(blocks, BLOCK)
    place = torch.zeros_like(order).scatter_(1, order, places)
    return (place.view(-1) - firsts)[: ids.numel()]


def _firsts(held: Tensor, blocks: int, experts: int) -> Tensor:
    """How many elements of its block are of a lower kind than each, int64 [blocks * BLOCK]."""
    keys = held + _numbers(held, BLOCK) * (experts + 1)
    counted = torch.zeros(blocks * (experts + 1), dtype=torch.int32, device=held.device)
    counted.scatter_add_(0, keys, torch.ones_like(held, dtype=torch.int32))
    table = counted.view(blocks, experts + 1).long()
    return (table.cumsum(1) - table).view(-1).index_select(0, keys)


def _take(ids: Tensor, table: RoutingTable, turns: Tensor) -> Tensor:
    """Of each element's run the entry that its turn, int64 [n], comes to."""
    experts = ids.masked_fill(strays(ids, table.experts), 0).long()
    start = table.start.long()
    # A table that was never committed has runs of no length.
    copies = (start[1:] - start[:-1]).clamp(min=1).index_select(0, experts)
    # No turn is negative, and torch_npu's `remainder` warns of a format that nobody asked for.
    return pick(ids, table, start.index_select(0, experts) + torch.fmod(turns, copies))
