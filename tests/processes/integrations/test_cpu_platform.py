"""Parts of the test platform that need no vLLM, each against a slower saying of the same."""

from pathlib import Path

import torch
from helpers.processes.rank_pool import Ranks
from helpers.rank_programs import uneven_collectives as uneven
from hypothesis import given
from hypothesis import strategies as st
from vllm_cpu.eplb.mapping import KNUTH, map_and_record
from vllm_cpu.local_experts import only_local

COUNTS = [[1, 1, 1], [3, 1, 2], [1, 4, 1], [7, 5, 6], [2, 2, 2]]
"""By rank; a data-parallel rank without requests computes one row for nothing."""


@st.composite
def placements(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """Slots by expert, each somewhere; and experts by token."""
    experts, k = draw(st.integers(2, 6)), draw(st.integers(1, 2))
    slots = [*range(experts), *draw(st.lists(st.integers(0, experts - 1), max_size=5))]
    slots = draw(st.permutations(slots))
    homes = [[slot for slot, expert in enumerate(slots) if expert == one] for one in range(experts)]
    chosen = st.lists(st.integers(0, experts - 1), min_size=k, max_size=k, unique=True)
    return homes, draw(st.lists(chosen, min_size=1, max_size=20))


def slot_of(homes: list[int], token: int) -> int:
    """The replica that a token takes, one token at a time."""
    return homes[token * KNUTH % 2**32 % len(homes)]


@given(placements(), st.booleans(), st.none() | st.integers(0, 20))
def test_map_and_record_picks_replica_slots_and_counts_load(
    placement: tuple[list[list[int]], list[list[int]]], record_load: bool, real: int | None
) -> None:
    homes, chosen = placement
    widest = max(len(slots) for slots in homes)
    table = torch.tensor([slots + [-1] * (widest - len(slots)) for slots in homes])
    load = torch.zeros(sum(len(slots) for slots in homes), dtype=torch.int32)
    routed_slots = map_and_record(
        torch.tensor(chosen, dtype=torch.int32),
        load,
        table,
        torch.tensor([len(slots) for slots in homes]),
        torch.tensor(record_load),
        None if real is None else torch.tensor(real),
    )
    expected = [[slot_of(homes[one], token) for one in row] for token, row in enumerate(chosen)]
    assert routed_slots.tolist() == expected
    assert routed_slots.dtype == torch.int32
    counted_slots = [slot for row in expected[:real] for slot in row] if record_load else []
    assert load.tolist() == [counted_slots.count(slot) for slot in range(len(load))]


@given(st.permutations(range(8)), st.integers(0, 8), st.lists(st.integers(0, 7), min_size=1))
def test_only_local_gives_remote_experts_zero_weight(
    order: list[int], here: int, ids: list[int]
) -> None:
    local = {expert: row for row, expert in enumerate(order[:here])}
    table = torch.tensor([local.get(expert, -1) for expert in range(8)])
    chosen = torch.tensor([ids], dtype=torch.int32)
    rows, weights = only_local(table, chosen, torch.full_like(chosen, 2.0, dtype=torch.float32))
    assert rows.tolist() == [[local.get(expert, 0) for expert in ids]]
    assert weights.tolist() == [[2.0 if expert in local else 0.0 for expert in ids]]
    assert rows.dtype == torch.int32


def test_uneven_gather_and_scatter_sum_match_definition(ranks: Ranks, tmp_path: Path) -> None:
    alike = ranks.run(uneven.both, 3, where=str(tmp_path / "store"), cases=COUNTS)
    assert alike == [len(COUNTS)] * 3
