"""Routing rules of other engines: against tables worked out by hand, and element by element."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal import routing
from equipoise.hal.routing_rules import (
    BLOCK,
    BlockTurns,
    RowHash,
    route_by_block_turns,
    route_by_row_hash,
    route_by_rule,
)

UNHURRIED = settings(deadline=None)
ALL_ROWS = 2**31 - 1
HELD = [1, 0, 1, 2, 0, 1]
"""Expert 0 in slots 1 and 4, expert 1 in 0, 2 and 5, expert 2 in 3."""
PADDING = len(HELD)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def table(placement: list[int]) -> routing.RoutingTable:
    """All shares on the first replica: the rules do not read them."""
    shares = [0 if expert in placement[:slot] else 65536 for slot, expert in enumerate(placement)]
    return routing.build_table(int32(placement), int32(shares), max(placement) + 1)


def vllm(top_k: int, rows: int = ALL_ROWS) -> RowHash:
    return RowHash(top_k, int32([rows]))


def test_row_hash_equals_vllm_formula_worked_by_hand() -> None:
    # t * 2654435769 mod 2**32 is 0, 2654435769, 1013904242, 3668340011, 2027808484, which leaves
    # 0 1 0 1 0 when divided by 2 and 0 0 2 2 1 when divided by 3.
    ids = int32([0, 1, 1, 0, 0, 2, 1, -1, 1, 0])
    slots, counts = route_by_row_hash(ids, table(HELD), vllm(2, rows=3))
    assert slots.tolist() == [1, 0, 0, 4, 1, 3, 5, PADDING, 2, 1]
    assert counts.tolist() == [3, 2, 1]


def test_block_turns_equal_tensorrt_llm_formula_worked_by_hand() -> None:
    first = [0, 0, 1, 0, 1, 1, 1, -1, 2]
    ids = int32([*first, *[-1] * (BLOCK - len(first)), 0, 1, 1])
    slots, counts = route_by_block_turns(ids, table(HELD), BlockTurns(offset=1))
    # Turns of the first block begin at 1, those of the second at 2.
    assert slots[: len(first)].tolist() == [4, 1, 2, 4, 5, 0, 2, PADDING, 3]
    assert set(slots[len(first) : BLOCK].tolist()) == {PADDING}
    assert slots[BLOCK:].tolist() == [1, 5, 0]
    assert counts.tolist() == [4, 6, 1]


def test_block_turns_offset_is_irrelevant_without_spare_slots() -> None:
    ids = int32([2, 0, 1, 1, 3, -1])
    for offset in (0, 1, 7):
        slots, _ = route_by_block_turns(ids, table([2, 0, 1]), BlockTurns(offset))
        assert slots.tolist() == [0, 1, 2, 2, 3, 3]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Placement and ids; often more than one block of them."""
    experts = draw(st.integers(1, 4))
    extra = draw(st.lists(st.integers(0, experts - 1), max_size=5))
    placement = draw(st.permutations([*range(experts), *extra]))
    ids = draw(st.lists(st.integers(-1, experts), max_size=12))
    return placement, ids * draw(st.sampled_from((1, 3, 200)))


def run(placement: list[int], expert: int) -> list[int]:
    return [slot for slot, occupant in enumerate(placement) if occupant == expert]


@UNHURRIED
@given(batches(), st.integers(1, 5), st.integers(0, 60))
def test_row_hash_equals_its_definition(
    batch: tuple[list[int], list[int]], top_k: int, rows: int
) -> None:
    placement, ids = batch
    routing_table = table(placement)
    slots, counts = route_by_rule(int32(ids), routing_table, vllm(top_k, rows))
    for j, (expert, slot) in enumerate(zip(ids, slots.tolist(), strict=True)):
        copies = run(placement, expert)
        turn = (j // top_k * 2654435769) % 2**32
        assert slot == (copies[turn % len(copies)] if copies else len(placement))
    counted_ids = ids[: rows * top_k]
    assert counts.tolist() == [counted_ids.count(expert) for expert in range(routing_table.experts)]


@UNHURRIED
@given(batches(), st.integers(0, 70))
def test_block_turns_equal_their_definition(
    batch: tuple[list[int], list[int]], offset: int
) -> None:
    placement, ids = batch
    routing_table = table(placement)
    slots, counts = route_by_rule(int32(ids), routing_table, BlockTurns(offset))
    for number, (low, high) in enumerate(pairwise(range(0, len(ids) + 2 * BLOCK, BLOCK))):
        occurrences: dict[int, int] = {}
        for expert, slot in zip(ids[low:high], slots[low:high].tolist(), strict=True):
            copies, turn = run(placement, expert), occurrences.get(expert, 0) + number + offset
            occurrences[expert] = occurrences.get(expert, 0) + 1
            assert slot == (copies[turn % len(copies)] if copies else len(placement))
    assert counts.tolist() == [ids.count(expert) for expert in range(routing_table.experts)]


def test_rules_refuse_invalid_parameters() -> None:
    with pytest.raises(ValueError, match="top_k: expected at least 1, got 0"):
        vllm(0)
    with pytest.raises(ValueError, match="offset: expected at least 0, got -1"):
        BlockTurns(-1)
