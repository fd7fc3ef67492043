"""Levelled routing against its clause: what it promises of any batch, and small cases by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal import levelled_routing, routing
from equipoise.hal.levelled_routing import (
    SWEEPS_ALONE,
    GroupCounts,
    group_rows,
    quota_ends,
    route_levelled,
)

UNHURRIED = settings(deadline=None)
RANK, LAYER = 3, 1


def table_of(placement: list[int]) -> routing.RoutingTable:
    """With shares that all go to the first replica: they must not matter."""
    shares = [65536 * (placement.index(expert) == slot) for slot, expert in enumerate(placement)]
    first, second = (torch.tensor(part, dtype=torch.int32) for part in (placement, shares))
    return routing.build_table(first, second, max(placement) + 1)


def ids_of(counts: list[int]) -> Tensor:
    """Every expert as often as that, interleaved."""
    ids = [expert for expert, count in enumerate(counts) for _ in range(count)]
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    return torch.tensor(ids, dtype=torch.int32)[order]


def rank_rows(slots: Tensor, placement: list[int], ranks: int) -> list[int]:
    """Rows that each rank gets."""
    return torch.bincount(slots // (len(placement) // ranks), minlength=ranks).tolist()


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], int]:
    """A placement, and the number of ranks."""
    experts, ranks = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    per_rank = -(-experts // ranks) + draw(st.integers(0, 3))
    spare = per_rank * ranks - experts
    extra = draw(st.lists(st.integers(0, experts - 1), min_size=spare, max_size=spare))
    return draw(st.permutations([*range(experts), *extra])), ranks


COUNT = st.one_of(st.integers(0, 9), st.integers(0, 200))


@UNHURRIED
@given(layouts(), st.data())
def test_levelled_routing_keeps_every_row_with_its_expert(
    layout: tuple[list[int], int], data: st.DataObject
) -> None:
    placement, ranks = layout
    experts = max(placement) + 1
    ids = torch.tensor(data.draw(st.lists(st.integers(-1, experts), max_size=80))).int()
    slots, counts = route_levelled(ids, table_of(placement), ranks, RANK, LAYER)
    for expert, slot in zip(ids.tolist(), slots.tolist(), strict=True):
        inside = 0 <= expert < experts
        assert placement[slot] == expert if inside else slot == len(placement)
    assert counts.tolist() == [ids.tolist().count(expert) for expert in range(experts)]


@UNHURRIED
@given(layouts(), st.data())
def test_levelled_rank_gets_no_more_than_the_largest_of_an_even_split(
    layout: tuple[list[int], int], data: st.DataObject
) -> None:
    placement, ranks = layout
    counts = [data.draw(COUNT) for _ in range(max(placement) + 1)]
    slots, _ = route_levelled(ids_of(counts), table_of(placement), ranks, RANK, LAYER)
    per_rank = len(placement) // ranks
    even = [0.0] * ranks
    for slot, expert in enumerate(placement):
        even[slot // per_rank] += counts[expert] / placement.count(expert)
    # Less than a row of each replica on the rank is due to rounding.
    assert max(rank_rows(slots, placement, ranks)) < max(even) + per_rank + 1


@UNHURRIED
@given(st.integers(2, 6), st.data())
def test_levelled_ranks_that_share_a_hot_expert_get_equal_rows(
    ranks: int, data: st.DataObject
) -> None:
    """Every rank has an expert of its own, and one that all have, with enough rows for any gap."""
    placement = [e for rank in range(ranks) for e in (rank, ranks)]
    own = [data.draw(st.integers(0, 40)) for _ in range(ranks)]
    counts = [*own, 40 * ranks + data.draw(st.integers(0, 40))]
    slots, _ = route_levelled(ids_of(counts), table_of(placement), ranks, RANK, LAYER)
    rows = rank_rows(slots, placement, ranks)
    assert max(rows) - min(rows) <= 2


def test_levelled_chain_moves_rows_over_several_experts() -> None:
    """Only rank 0 has rows of its own, and it reaches rank 3 through ranks 1 and 2 alone."""
    placement, counts = [0, 2, 2, 3, 3, 4, 4, 1], [100, 0, 200, 200, 200]
    slots, _ = route_levelled(ids_of(counts), table_of(placement), 4, RANK, LAYER)
    rows = rank_rows(slots, placement, 4)
    assert max(rows) - min(rows) <= 2


@pytest.mark.parametrize("total", [0, 1, 7, 1000])
def test_levelled_expert_with_one_replica_sends_all_rows_there(total: int) -> None:
    slots, _ = route_levelled(ids_of([total, 3]), table_of([1, 0]), 2, RANK, LAYER)
    assert slots.tolist().count(1) == total


@UNHURRIED
@given(layouts(), st.data())
def test_levelled_group_divides_its_sum_as_one_batch(
    layout: tuple[list[int], int], data: st.DataObject
) -> None:
    """What the members get, one after the other, is what one rank with all rows gets that makes as
    many sweeps."""
    placement, ranks = layout
    table, experts = table_of(placement), max(placement) + 1
    members = [
        torch.tensor(data.draw(st.lists(st.integers(-1, experts - 1), max_size=40))).int()
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    counts = [routing.count_experts(ids, experts) for ids in members]
    total = torch.stack(counts).sum(0).int()
    slots = [
        route_levelled(
            ids,
            table,
            ranks,
            RANK,
            LAYER,
            GroupCounts(total, torch.stack(counts)[:number].sum(0).int()),
        )[0]
        for number, ids in enumerate(members)
    ]
    alone = GroupCounts(total, torch.zeros_like(total))
    expected, _ = route_levelled(torch.cat(members), table, ranks, RANK, LAYER, alone)
    assert torch.cat(slots).tolist() == expected.tolist()


@UNHURRIED
@given(layouts(), st.integers(0, 5), st.integers(0, 5), st.data())
def test_group_rows_are_the_slots_of_each_member_counted(
    layout: tuple[list[int], int], number: int, layer: int, data: st.DataObject
) -> None:
    placement, ranks = layout
    table, experts = table_of(placement), max(placement) + 1
    drawn = st.lists(COUNT, min_size=experts, max_size=experts)
    members = data.draw(st.lists(drawn, min_size=1, max_size=4))
    counts = torch.tensor(members, dtype=torch.int32)
    rows = group_rows(counts, table, ranks, number, layer)
    for member, own in enumerate(members):
        group = GroupCounts(counts.sum(0).int(), counts[:member].sum(0).int())
        slots, _ = route_levelled(ids_of(own), table, ranks, number, layer, group)
        assert rows[member].tolist() == torch.bincount(slots, minlength=table.slots).tolist()


def test_levelled_quotas_of_ranks_and_layers_round_differently() -> None:
    """Seven rows over two replicas: three and four, or four and three."""
    table, counts = table_of([0, 0]), torch.tensor([7])
    first = {
        quota_ends(counts, table, 2, rank, layer, SWEEPS_ALONE)[0]
        for rank in range(8)
        for layer in (0, 1)
    }
    assert first == {3, 4}


def test_levelled_rows_beyond_the_last_quota_go_to_the_last_replica() -> None:
    group = GroupCounts(torch.tensor([2]).int(), torch.tensor([5]).int())
    slots, _ = route_levelled(torch.zeros(3).int(), table_of([0, 0]), 2, RANK, LAYER, group)
    assert slots.tolist() == [1, 1, 1]


def test_levelling_sweeps_suffice_at_the_size_of_a_real_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thirty-two ranks in a chain of pairs, one row in a hundred more than with many sweeps."""
    ranks, generator = 32, torch.Generator().manual_seed(1)
    placement = [e for rank in range(ranks) for e in (rank, ranks + rank, ranks + (rank + 1) % 32)]
    counts = torch.cat([
        torch.randint(30, 50, (ranks,), generator=generator),
        torch.randint(30, 50, (ranks,), generator=generator),
    ])  # fmt: skip
    ids = ids_of(counts.tolist())

    def largest(sweeps: int) -> int:
        monkeypatch.setattr(levelled_routing, "SWEEPS_ALONE", sweeps)
        slots, _ = route_levelled(ids, table_of(placement), ranks, RANK, LAYER)
        return max(rank_rows(slots, placement, ranks))

    assert largest(SWEEPS_ALONE) <= largest(200) + 1 < largest(0)
