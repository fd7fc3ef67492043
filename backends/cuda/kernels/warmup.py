"""Compiling every kernel before it is needed.

A kernel is compiled at its first launch, which takes a second or so and must not fall into a step
or into the capture of a graph. What is compiled depends on the sizes of the tables, on whether a
batch is small, and on whether pointers stand on multiples of 16 bytes, as fresh tensors do.
"""

import torch
from torch import Tensor

from equipoise.backends.cuda.kernels.checksums import checksum
from equipoise.backends.cuda.kernels.counting import count
from equipoise.backends.cuda.kernels.engine_rules import route_by_rule
from equipoise.backends.cuda.kernels.hash_routing import route_hashed
from equipoise.backends.cuda.kernels.histogram import BATCHES
from equipoise.backends.cuda.kernels.levelled_routing import route_levelled
from equipoise.backends.cuda.kernels.quota_routing import SMALL, route_apportioned
from equipoise.backends.cuda.kernels.share_solver import solve_shares
from equipoise.backends.cuda.kernels.table_commit import commit_tables
from equipoise.backends.cuda.kernels.workspace import BLOCK, Workspace
from equipoise.hal.kernels import Salt, Tables
from equipoise.hal.levelled_routing import GroupCounts
from equipoise.hal.routing_rules import BlockTurns, RowHash


def warm(like: Tables, workspace: Workspace) -> None:
    """Launch every kernel on tables as large as `like`, on the current stream.

    Args:
        like: neither read nor written.
        workspace: of this stream; it is left as it was.
    """
    device = like.start.device
    tables = Tables.empty(like.layers, like.experts, like.slots, like.ranks, device)
    wide = 1 + tables.experts + 1 + 2 * tables.slots
    commit_tables(torch.zeros((1, wide), dtype=torch.int32, device=device), tables)
    for dtype in (torch.int32, torch.int64):
        counts = torch.zeros(tables.experts, dtype=dtype, device=device)
        cumulative = torch.empty(tables.slots, dtype=torch.int32, device=device)
        solve_shares(counts, tables, 0, cumulative, workspace)
    # One batch for each way to divide it: to route, and to number its occurrences.
    sizes = {1, *(most + 1 for most, *_ in BATCHES), BLOCK + 1, SMALL + 1}
    for size in sizes:
        _route(torch.zeros(size, dtype=torch.int32, device=device), tables, workspace)
    for size in (1, SMALL + 1):
        _level(torch.zeros(size, dtype=torch.int32, device=device), tables, workspace)
    buffer = torch.zeros(64, dtype=torch.uint8, device=device)
    checksums = torch.empty(2, dtype=torch.int64, device=device)
    # Of several slots every other sum stands on no multiple of 16, and parts begin where they will.
    for offset in (0, 1, 4):
        for place in (0, 1):
            checksum(buffer[offset:], checksums[place : place + 1], workspace)


def _route(ids: Tensor, tables: Tables, workspace: Workspace) -> None:
    slots, counts = torch.empty_like(ids), ids.new_empty(tables.experts)
    cumulative, salt = tables.cumulative[0, 0], Salt(0, 0, 0)
    count(ids, counts, workspace)
    route_hashed(ids, tables, salt, slots, counts, workspace)
    if ids.numel() <= workspace.sizes.elements:
        route_apportioned(ids, tables, cumulative, salt, slots, counts, workspace)
    for rule in (RowHash(1, ids.new_zeros(1)), BlockTurns(0)):
        route_by_rule(rule, ids, tables, 0, slots, counts, workspace)


def _level(ids: Tensor, tables: Tables, workspace: Workspace) -> None:
    if ids.numel() > workspace.sizes.elements:
        return
    slots, counts = torch.empty_like(ids), ids.new_empty(tables.experts)
    zeros = ids.new_zeros(tables.experts)
    for group in (None, GroupCounts(zeros, zeros)):
        route_levelled(ids, tables, Salt(0, 0, 0), group, slots, counts, workspace)
