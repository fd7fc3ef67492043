"""Native kernels of other engines' rules against the torch reference, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.native.test_routing import batches, outputs

from equipoise import _native
from equipoise.hal import routing
from equipoise.hal.routing_rules import (
    BLOCK,
    BlockTurns,
    RowHash,
    route_by_block_turns,
    route_by_row_hash,
)

UNHURRIED = settings(deadline=None)
REPEATS = st.sampled_from((1, 1, 40, 400))
"""Blocks of 1024 are crossed by repeated batches only."""
HIGHEST = 2**31 - 1
Batch = tuple[routing.RoutingTable, torch.Tensor]


def runs(table: routing.RoutingTable) -> tuple[torch.Tensor, torch.Tensor]:
    return table.start, table.replicas


@UNHURRIED
@given(batches(), REPEATS, st.integers(1, 9), st.one_of(st.integers(0, 40), st.just(HIGHEST)))
def test_route_by_row_hash_equals_reference(
    batch: Batch, repeat: int, top_k: int, rows: int
) -> None:
    table, ids = batch[0], batch[1].repeat(repeat)
    slots, counts = outputs(table, ids)
    _native.route_by_row_hash(ids, *runs(table), top_k, rows, slots, counts)
    rule = RowHash(top_k, torch.tensor([rows], dtype=torch.int32))
    expected = route_by_row_hash(ids, table, rule)
    assert slots.tolist() == expected[0].tolist()
    assert counts.tolist() == expected[1].tolist()


@UNHURRIED
@given(batches(), REPEATS, st.one_of(st.integers(0, 40), st.just(HIGHEST)))
def test_route_by_block_turns_equals_reference(batch: Batch, repeat: int, offset: int) -> None:
    table, ids = batch[0], batch[1].repeat(repeat)
    slots, counts = outputs(table, ids)
    _native.route_by_block_turns(ids, *runs(table), offset, slots, counts)
    expected = route_by_block_turns(ids, table, BlockTurns(offset))
    assert slots.tolist() == expected[0].tolist()
    assert counts.tolist() == expected[1].tolist()


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_route_by_block_turns_restarts_at_block_edge(size: int) -> None:
    # Of three copies the block would make no difference: 1024 leaves 1.
    placement, shares = torch.zeros(5).int(), torch.tensor([65536, 0, 0, 0, 0]).int()
    table = routing.build_table(placement, shares, 1)
    ids = torch.zeros(size, dtype=torch.int32)
    slots, counts = outputs(table, ids)
    _native.route_by_block_turns(ids, *runs(table), 5, slots, counts)
    assert slots.tolist() == [(j % BLOCK + j // BLOCK + 5) % 5 for j in range(size)]
