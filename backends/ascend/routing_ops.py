"""Routing in operators of the device, bit for bit `equipoise.hal.routing` and `hal.routing_rules`.

Nothing here makes the host wait: no size is read back, no boolean tensor selects elements, and
every scalar goes into the operator as an argument.
"""

import torch
from torch import Tensor

from equipoise.backends.ascend.hashing import mix32, shift_right
from equipoise.backends.ascend.lookup_tables import ReplicaTables
from equipoise.hal.kernels import Salt, Tables
from equipoise.hal.routing import SHARE_BITS, RoutingTable
from equipoise.hal.routing_rules import BLOCK


def live_table(tables: Tables, layer: int) -> RoutingTable:
    """The tables of a layer that its generation word picks when the stream comes here (G1)."""
    word = tables.generation[layer : layer + 1] & 1
    parts = (tables.start, tables.replicas, tables.cumulative)
    return RoutingTable(*(part[:, layer].index_select(0, word)[0] for part in parts))


def count_experts(ids: Tensor, counts: Tensor, first: int = 0) -> None:
    """Write to `counts`, int32 [experts], how often each of `first`, `first` + 1, ... occurs.

    One launch: a histogram whose ends are the first and the last expert, so that it leaves out
    everything else. Its bins are (experts - 1) / experts wide, which puts each number into the bin
    of its own, the last one too, since the upper end counts as inside.
    """
    experts = counts.numel()
    if experts == 1:  # a histogram from a number to itself takes its ends from the data
        torch.sum(ids == first, 0, keepdim=True, dtype=torch.int32, out=counts)
    elif experts:
        torch.histc(ids, experts, first, first + experts - 1, out=counts)


def route_hashed(
    ids: Tensor, draws: Tensor, tables: ReplicaTables, layer: int, slots: Tensor
) -> None:
    """Write to `slots`, int32 [n], those at the `draws`, int32 [n], of the live set: 5 launches."""
    entries = torch.addcmul(draws, kinds(ids, tables.experts), live_word(tables, 0, layer))
    torch.index_select(tables.replicas[layer], 0, entries, out=slots)


def kinds(ids: Tensor, experts: int) -> Tensor:
    """The expert + 1; 0 for padding below and experts + 1 above."""
    return ids.clamp(-1, experts).add_(1)


def live_word(tables: ReplicaTables, which: int, layer: int) -> Tensor:
    """The word that picks the live set, int32 [1]; taken once.

    A copy, since an operator on many elements reads its operands at many times: a commit on another
    stream may come between two of them (G1).
    """
    return tables.words[which, layer : layer + 1].clone()


def route_apportioned(
    ids: Tensor, table: RoutingTable, cumulative: Tensor, counts: Tensor, salt: Salt
) -> Tensor:
    """Slots, int32 [n], by whole quotas of this batch's `counts`."""
    expert_counts, owners = counts.long(), _owners(table)
    first = expert_counts.cumsum(0) - expert_counts
    experts = torch.arange(table.experts, device=ids.device)
    dither = shift_right(mix32(experts, salt.rank, salt.layer, 0), 16)
    quotas = cumulative.long() * expert_counts.index_select(0, owners)
    ends = shift_right(quotas + dither.index_select(0, owners), SHARE_BITS)
    sorted_by = ids.masked_fill(padding_mask(ids, table.experts), table.experts)
    # As float32, which is exact here: the device sorts no integers but on its own processors.
    order = torch.argsort(sorted_by.float(), stable=True)
    # Sorted by expert, an element's position is its occurrence plus the experts before it.
    positions = torch.arange(ids.numel(), device=ids.device)
    position = torch.zeros_like(order).index_copy_(0, order, positions)
    entries = torch.searchsorted(ends + first.index_select(0, owners), position, right=True)
    return slots_at(ids, table, entries)


def padding_mask(ids: Tensor, experts: int) -> Tensor:
    """Where the padding is."""
    return (ids < 0) | (ids >= experts)


def _owners(table: RoutingTable) -> Tensor:
    """The expert of each entry of the table, int64 [slots]; before the first commit, any."""
    places = torch.arange(table.slots, device=table.start.device)
    owners = torch.searchsorted(table.start[1:].long(), places, right=True)
    return owners.clamp(max=table.experts - 1)


def slots_at(ids: Tensor, table: RoutingTable, chosen: Tensor) -> Tensor:
    """The slots at `chosen` places of the table; padding goes to the invalid one."""
    slots = table.replicas.index_select(0, chosen.clamp(max=table.slots - 1))
    return slots.masked_fill(padding_mask(ids, table.experts), table.slots)


def route_by_row_hash(
    ids: Tensor, turns: Tensor, tables: ReplicaTables, layer: int, slots: Tensor
) -> Tensor:
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
    element_kinds = kinds(ids, tables.experts)
    columns = torch.addcmul(tables.padding, element_kinds, live_word(tables, 1, layer))
    first, copies = torch.index_select(tables.runs[layer], 1, columns)
    # No turn is negative, and torch_npu's `remainder` warns of a format that nobody asked for.
    entries = torch.fmod(turns, copies).add_(first)
    torch.index_select(tables.slots[layer], 0, entries, out=slots)
    return element_kinds


def count_rows(kinds: Tensor, numbers: Tensor, rows: Tensor, counts: Tensor) -> None:
    """Count `kinds`, int32 [n], of the first `rows` rows, int32 [1]: 3 launches.

    Args:
        kinds: overwritten.
        numbers: int32 [n], each element's row.
        rows: how many are counted.
        counts: int32 [experts], written.
    """
    row_mask = torch.gt(rows, numbers, out=torch.empty_like(numbers))
    count_experts(kinds.mul_(row_mask), counts, first=1)


def route_by_block_turns(ids: Tensor, table: RoutingTable, offset: int) -> Tensor:
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
    expert_ids = torch.full((blocks * BLOCK,), experts, dtype=torch.int64, device=ids.device)
    expert_ids[: ids.numel()].copy_(ids.masked_fill(padding_mask(ids, experts), experts))
    # As float32, which is exact here: the device sorts no integers but on its own processors.
    order = torch.argsort(expert_ids.view(blocks, BLOCK).float(), dim=1, stable=True)
    # Sorted within its block, an element's place is its turn plus what stands before its kind.
    firsts = _firsts(expert_ids, blocks, experts)
    places = torch.arange(BLOCK, device=ids.device).expand(blocks, BLOCK)
    place = torch.zeros_like(order).scatter_(1, order, places)
    return (place.view(-1) - firsts)[: ids.numel()]


def _firsts(expert_ids: Tensor, blocks: int, experts: int) -> Tensor:
    """How many elements of its block are of a lower kind than each, int64 [blocks * BLOCK]."""
    keys = expert_ids + _numbers(expert_ids, BLOCK) * (experts + 1)
    block_counts = torch.zeros(blocks * (experts + 1), dtype=torch.int32, device=expert_ids.device)
    block_counts.scatter_add_(0, keys, torch.ones_like(expert_ids, dtype=torch.int32))
    table = block_counts.view(blocks, experts + 1).long()
    return (table.cumsum(1) - table).view(-1).index_select(0, keys)


def _take(ids: Tensor, table: RoutingTable, turns: Tensor) -> Tensor:
    """Of each element's run the entry that its turn, int64 [n], comes to."""
    experts = ids.masked_fill(padding_mask(ids, table.experts), 0).long()
    start = table.start.long()
    # A table that was never committed has runs of no length.
    copies = (start[1:] - start[:-1]).clamp(min=1).index_select(0, experts)
    # No turn is negative, and torch_npu's `remainder` warns of a format that nobody asked for.
    return slots_at(ids, table, start.index_select(0, experts) + torch.fmod(turns, copies))
