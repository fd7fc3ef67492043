"""Routers that choose as other engines do."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.backends.cpu import BACKEND
from equipoise.backends.cpu.accelerator import CpuAccelerator
from equipoise.balancer.experts.config import RoutingRule
from equipoise.balancer.experts.placement import ExpertShape, Layout, even_shares, initial_placement
from equipoise.balancer.experts.routing.layer_update import table_update
from equipoise.balancer.experts.routing.routers import BlockRoundRobinRouter, RowHashRouter
from equipoise.hal.kernels import Tables
from equipoise.hal.routing import RoutingTable
from equipoise.hal.routing_rules import BlockTurns, RowHash, route_by_rule
from equipoise.hal.stream import Role

SHAPE = ExpertShape(layers=2, experts=4, slots=8, ranks=2)
TOP_K = 3
LAYER = 1


@pytest.fixture
def cpu() -> Iterator[CpuAccelerator]:
    accelerator = BACKEND.open(0)
    yield accelerator
    accelerator.close()


def layout() -> Layout:
    """All tokens on the first replica, as far as shares go."""
    placement = initial_placement(SHAPE)
    shares = np.zeros_like(placement)
    for layer in range(SHAPE.layers):
        first = [placement[layer].tolist().index(expert) for expert in range(SHAPE.experts)]
        shares[layer, first] = 65536
    return Layout(placement, shares)


def committed_tables(cpu: CpuAccelerator) -> tuple[Tables, RoutingTable]:
    """Tables of all layers, and that of the layer that is routed."""
    tables = Tables.empty(SHAPE.layers, SHAPE.experts, SHAPE.slots, SHAPE.ranks, cpu.device)
    update = table_update(layout(), SHAPE, range(SHAPE.layers))
    cpu.kernels.commit_tables(update, tables, cpu.stream(Role.COMPUTE))
    parts = (update.start[LAYER], update.replicas[LAYER], update.cumulative[LAYER])
    return tables, RoutingTable(*parts)


def counters() -> Tensor:
    return torch.full((SHAPE.layers, SHAPE.experts), 5, dtype=torch.int32)


def ids() -> Tensor:
    return torch.arange(7 * TOP_K, dtype=torch.int32).reshape(-1, TOP_K) % (SHAPE.experts + 1)


def settle(cpu: CpuAccelerator) -> None:
    cpu.stream(Role.COMPUTE).synchronize(WATCHDOG)


def test_row_hash_router_matches_rule_and_counts_valid_rows_only(cpu: CpuAccelerator) -> None:
    tables, table = committed_tables(cpu)
    row_counts = counters()
    router = RowHashRouter(cpu, tables, row_counts)
    for rows in (2**31 - 1, 2):
        cpu.stream(Role.COMPUTE).launch(partial(router.rows.fill_, rows))
        before = row_counts.clone()
        slots = router.route(LAYER, 3, ids())
        settle(cpu)
        rule = RowHash(TOP_K, torch.tensor([rows], dtype=torch.int32))
        expected = route_by_rule(ids().view(-1), table, rule)
        assert slots.view(-1).tolist() == expected[0].tolist()
        before[LAYER] += expected[1]
        assert row_counts.tolist() == before.tolist()


def test_row_hash_router_counts_all_rows_by_default(cpu: CpuAccelerator) -> None:
    row_counts = counters()
    router = RowHashRouter(cpu, committed_tables(cpu)[0], row_counts)
    router.route(0, 0, torch.zeros((9, 1), dtype=torch.int32))
    settle(cpu)
    assert row_counts[0].tolist() == [14, 5, 5, 5]


@pytest.mark.parametrize("offset", [0, 1])
def test_block_turn_router_starts_at_offset(cpu: CpuAccelerator, offset: int) -> None:
    tables, table = committed_tables(cpu)
    row_counts = counters()
    slots = BlockRoundRobinRouter(cpu, tables, offset, row_counts).route(LAYER, 3, ids())
    settle(cpu)
    expected = route_by_rule(ids().view(-1), table, BlockTurns(offset))
    assert slots.shape == ids().shape
    assert slots.view(-1).tolist() == expected[0].tolist()
    assert (row_counts[LAYER] - 5).tolist() == expected[1].tolist()


def test_compat_routers_report_even_shares(cpu: CpuAccelerator) -> None:
    tables, load = committed_tables(cpu)[0], np.array([[9, 1, 1, 1]] * 2, dtype=np.int64)
    even = even_shares(layout().placement, SHAPE.experts).tolist()
    for router in (
        RowHashRouter(cpu, tables, counters()),
        BlockRoundRobinRouter(cpu, tables, 0, counters()),
    ):
        assert router.shares(load, layout(), SHAPE).tolist() == even


def test_routing_rule_names_match_configuration() -> None:
    assert [rule.value for rule in RoutingRule] == ["shares", "vllm", "tensorrt_llm"]
