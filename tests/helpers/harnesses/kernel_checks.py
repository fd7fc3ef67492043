"""Each kernel against its reference, on one case; the first difference is an AssertionError."""

from typing import Any

import pytest
import torch
from helpers.harnesses.kernel_launchers import Launchers, guarded, intact, is_clean, on_device
from helpers.strategies.routing_kernel_cases import World, copied_to
from torch import Tensor

from equipoise.hal import levelled_routing, routing, routing_rules
from equipoise.hal.checksum import as_int64, checksum
from equipoise.hal.kernels import Salt, Tables
from equipoise.hal.levelled_routing import GroupCounts
from equipoise.hal.routing_rules import BlockTurns, ReplicaRule, RowHash

ATTEMPTS = 2
"""Launches of each kernel on one workspace: the second finds what the first left."""


def workspace_of(launchers: Launchers, world: World, elements: int = 0) -> Any:
    table, ranks = world.table, world.tables.ranks
    return launchers.workspace(table.experts, table.slots, ranks, elements)


def check_count(launchers: Launchers, ids: Tensor, experts: int) -> None:
    workspace, device_ids = launchers.workspace(experts, experts), on_device(ids)
    for offset in range(ATTEMPTS):
        memory, counts = guarded(experts, offset)
        launchers.count(device_ids, counts, workspace)
        assert counts.tolist() == routing.count_experts(ids, experts).tolist()
        assert intact(memory, experts, offset)
    assert is_clean(workspace)


def check_hashed(launchers: Launchers, world: World, ids: Tensor, rank: int, step: int) -> None:
    expected = routing.route_hashed(ids, world.table, rank, world.layer, step)
    salt, workspace = Salt(rank, world.layer, step), workspace_of(launchers, world)

    def launch(slots: Tensor, counts: Tensor) -> None:
        launchers.route_hashed(on_device(ids), world.tables, salt, slots, counts, workspace)

    _check_routing(launch, expected)
    assert is_clean(workspace)


def check_apportioned(launchers: Launchers, world: World, ids: Tensor, rank: int) -> None:
    expected = routing.route_apportioned(ids, world.table, rank, world.layer)
    workspace = workspace_of(launchers, world, ids.numel())
    salt, shares = Salt(rank, world.layer, 5), on_device(world.table.cumulative)

    def launch(slots: Tensor, counts: Tensor) -> None:
        launchers.route_apportioned(
            on_device(ids), world.tables, shares, salt, slots, counts, workspace
        )

    _check_routing(launch, expected)
    assert is_clean(workspace)


def check_levelled(
    launchers: Launchers, world: World, ids: Tensor, rank: int, group: GroupCounts | None = None
) -> None:
    ranks, layer = world.tables.ranks, world.layer
    expected = levelled_routing.route_levelled(ids, world.table, ranks, rank, layer, group)
    workspace, salt = workspace_of(launchers, world, ids.numel()), Salt(rank, layer, 5)
    device_group = group and GroupCounts(on_device(group.total), on_device(group.before))
    total, sweeps = expected[1], levelled_routing.SWEEPS_ALONE
    if group:
        total, sweeps = group.total, levelled_routing.SWEEPS_OF_GROUP
    ends = levelled_routing.quota_ends(total, world.table, ranks, rank, layer, sweeps)
    copies = world.table.start.diff()
    plural = (copies > 1).repeat_interleave(copies)

    def launch(slots: Tensor, counts: Tensor) -> None:
        launchers.route_levelled(
            on_device(ids), world.tables, salt, device_group, slots, counts, workspace
        )
        quota_ends = workspace.slot_places[0, : world.table.slots].cpu()
        assert quota_ends[plural].tolist() == torch.tensor(ends)[plural].tolist()

    _check_routing(launch, expected)
    assert is_clean(workspace)


def check_rule(launchers: Launchers, world: World, ids: Tensor, rule: ReplicaRule) -> None:
    match rule:
        case RowHash(top_k, rows):
            device_rule: ReplicaRule = RowHash(top_k, on_device(rows))
        case BlockTurns():
            device_rule = rule
    expected = routing_rules.route_by_rule(ids, world.table, rule)
    workspace = workspace_of(launchers, world)

    def launch(slots: Tensor, counts: Tensor) -> None:
        launchers.route_by_rule(
            device_rule, on_device(ids), world.tables, world.layer, slots, counts, workspace
        )

    _check_routing(launch, expected)
    assert is_clean(workspace)


def check_turns(launchers: Launchers, world: World, ids: Tensor, offset: int, turns: int) -> None:
    """With blocks of the rule of `turns` elements, so that a small batch has several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing_rules, "BLOCK", turns)
        patch.setattr(launchers.module("engine_rules"), "TURNS", turns)
        check_rule(launchers, world, ids, BlockTurns(offset))


def _check_routing(launch: Any, expected: tuple[Tensor, Tensor]) -> None:
    elements, experts = expected[0].numel(), expected[1].numel()
    for offset in range(ATTEMPTS):
        memory, slots = guarded(elements, offset)
        all_counts, counts = guarded(experts, offset)
        launch(slots, counts)
        assert slots.tolist() == expected[0].tolist()
        assert counts.tolist() == expected[1].tolist()
        assert intact(memory, elements, offset)
        assert intact(all_counts, experts, offset)


def check_solver(launchers: Launchers, world: World, loads: list[Tensor]) -> None:
    """One load after the other, on one workspace."""
    table, ranks = world.table, world.tables.ranks
    workspace = workspace_of(launchers, world)
    for offset, load in enumerate(loads):
        whole, cumulative = guarded(table.slots, offset)
        launchers.solve_shares(on_device(load), world.tables, world.layer, cumulative, workspace)
        assert cumulative.tolist() == routing.solve_cumulative(load, table, ranks).tolist()
        assert intact(whole, table.slots, offset)
        assert is_clean(workspace)


def check_commits(
    launchers: Launchers, tables: Tables, commits: list[tuple[list[int], Tensor]]
) -> None:
    """Commits of layers and their rows, held to a copy of the tables on the host."""
    expected = copied_to(tables, torch.device("cpu"))
    widths = [tables.experts + 1, tables.slots, tables.slots]
    for layers, rows in commits:
        numbers = torch.tensor(layers, dtype=torch.int32)[:, None]
        launchers.commit_tables(on_device(torch.cat([numbers, rows], 1)), tables)
        for layer, row in zip(layers, rows, strict=True):
            expected.generation[layer] += 1
            idle = int(expected.generation[layer]) & 1
            parts = (expected.start, expected.replicas, expected.cumulative)
            for part, values in zip(parts, torch.split(row, widths), strict=True):
                part[idle, layer] = values
        for name in ("generation", "start", "replicas", "cumulative"):
            assert getattr(tables, name).tolist() == getattr(expected, name).tolist()


def check_checksum(launchers: Launchers, data: Tensor, offset: int) -> None:
    """Of bytes that stand `offset` bytes behind an aligned address."""
    workspace = launchers.workspace()
    memory = torch.zeros(data.numel() + offset, dtype=torch.uint8)
    memory[offset:] = data
    device_data = on_device(memory)[offset:]
    for shift in range(ATTEMPTS):
        guarded_memory, out = guarded(1, shift, torch.int64)
        launchers.checksum(device_data, out, workspace)
        assert out.tolist() == [as_int64(checksum(data))]
        assert intact(guarded_memory, 1, shift)
    assert is_clean(workspace)


def check_checksum_rows(launchers: Launchers, data: Tensor) -> None:
    """Of every row of uint8 [n, bytes]."""
    workspace = launchers.workspace(buffers=max(1, data.shape[0]))
    whole, out = guarded(data.shape[0], 1, torch.int64)
    launchers.checksum_rows(on_device(data), out, workspace)
    assert out.tolist() == [as_int64(checksum(row.contiguous())) for row in data]
    assert intact(whole, data.shape[0], 1)
    assert is_clean(workspace)


def check_checksum_parts(launchers: Launchers, parts: list[Tensor]) -> None:
    """Of uint8 [n] each, back to back."""
    workspace, expected = launchers.workspace(), as_int64(checksum(torch.cat(parts)))
    for shift in range(ATTEMPTS):
        memory, out = guarded(1, shift, torch.int64)
        launchers.checksum_parts([on_device(part) for part in parts], out, workspace)
        assert out.tolist() == [expected]
        assert intact(memory, 1, shift)
    assert is_clean(workspace)
