"""Routing as operators of the device, bit for bit `equipoise.hal.routing`.

Nothing here makes the host wait: no size is read back, no boolean picks elements, and every scalar
goes into the operator as an argument.
"""

import torch
from torch import Tensor

from equipoise.backends.ascend.bits import mix32, shift
from equipoise.hal.kernels import Salt, Tables
from equipoise.hal.routing import SHARE_BITS, SHARE_ONE, RoutingTable


def live(tables: Tables, layer: int) -> RoutingTable:
    """The tables of a layer that its generation word picks when the stream comes here (G1)."""
    word = tables.generation[layer : layer + 1] & 1
    parts = (tables.start, tables.replicas, tables.cumulative)
    return RoutingTable(*(part[:, layer].index_select(0, word)[0] for part in parts))


def count(ids: Tensor, experts: int) -> Tensor:
    """Tokens per expert, int32 [experts]; padding is counted into one more and left out."""
    kinds = ids.masked_fill(strays(ids, experts), experts).long()
    total = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    return total.scatter_add_(0, kinds, torch.ones_like(ids))[:experts]


def hashed(ids: Tensor, table: RoutingTable, salt: Salt) -> Tensor:
    """Slots, int32 [n], by the hash of each element's place."""
    places = torch.arange(ids.numel(), device=ids.device)
    draw = shift(mix32(places, salt.rank, salt.layer, salt.step), 16)
    # Runs follow each other, so with an offset per expert one sorted array serves all.
    ends = table.cumulative.long() + _owners(table) * SHARE_ONE
    chosen = torch.searchsorted(ends, draw + ids.long() * SHARE_ONE, right=True)
    return pick(ids, table, chosen)


def apportioned(
    ids: Tensor, table: RoutingTable, cumulative: Tensor, counts: Tensor, salt: Salt
) -> Tensor:
    """Slots, int32 [n], by whole quotas of this batch's `counts`."""
    counted, owners = counts.long(), _owners(table)
    first = counted.cumsum(0) - counted
    experts = torch.arange(table.experts, device=ids.device)
    dither = shift(mix32(experts, salt.rank, salt.layer, 0), 16)
    quotas = cumulative.long() * counted.index_select(0, owners)
    ends = shift(quotas + dither.index_select(0, owners), SHARE_BITS)
    kinds = ids.masked_fill(strays(ids, table.experts), table.experts)
    # As float32, which is exact here: the device sorts no integers but on its own processors.
    order = torch.argsort(kinds.float(), stable=True)
    # Sorted by expert, an element's position is its occurrence plus the experts before it.
    positions = torch.arange(ids.numel(), device=ids.device)
    position = torch.zeros_like(order).index_copy_(0, order, positions)
    chosen = torch.searchsorted(ends + first.index_select(0, owners), position, right=True)
    return pick(ids, table, chosen)


def strays(ids: Tensor, experts: int) -> Tensor:
    """Where the padding is."""
    return (ids < 0) | (ids >= experts)


def _owners(table: RoutingTable) -> Tensor:
    """The expert of each entry of the table, int64 [slots]; before the first commit, any."""
    places = torch.arange(table.slots, device=table.start.device)
    found = torch.searchsorted(table.start[1:].long(), places, right=True)
    return found.clamp(max=table.experts - 1)


def pick(ids: Tensor, table: RoutingTable, chosen: Tensor) -> Tensor:
    """The slots at `chosen` places of the table; padding goes to the invalid one."""
    slots = table.replicas.index_select(0, chosen.clamp(max=table.slots - 1))
    return slots.masked_fill(strays(ids, table.experts), table.slots)
