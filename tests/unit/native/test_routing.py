"""Native routing against the torch reference, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise import _native
from equipoise.hal import routing

UNHURRIED = settings(deadline=None)
WORD = st.integers(0, 2**31 - 1)


@st.composite
def tables(draw: st.DrawFn) -> routing.RoutingTable:
    """Any shares, zero included, of any placement."""
    experts = draw(st.integers(1, 6))
    extra = draw(st.lists(st.integers(0, experts - 1), max_size=8))
    placement = torch.tensor(draw(st.permutations([*range(experts), *extra])), dtype=torch.int32)
    shares = torch.empty_like(placement)
    for expert in range(experts):
        slots = (placement == expert).nonzero().flatten()
        cut = st.one_of(st.sampled_from([0, 65536]), *[st.integers(1, 65535)] * 3)
        cuts = draw(st.lists(cut, min_size=len(slots) - 1, max_size=len(slots) - 1))
        ends = torch.tensor([0, *sorted(cuts), 65536], dtype=torch.int32)
        shares[slots] = ends.diff()
    return routing.build_table(placement, shares, experts)


@st.composite
def batches(draw: st.DrawFn) -> tuple[routing.RoutingTable, torch.Tensor]:
    """A table, and ids of which some are padding; also no ids at all."""
    table = draw(tables())
    padding = st.sampled_from([-1, -(2**31), table.experts, 2**31 - 1])
    inside = st.integers(0, table.experts - 1)
    ids = draw(st.lists(st.one_of(inside, inside, inside, padding), max_size=60))
    return table, torch.tensor(ids, dtype=torch.int32)


def arrays(table: routing.RoutingTable) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return table.start, table.replicas, table.cumulative


def outputs(table: routing.RoutingTable, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Filled with rubbish, so that what is not written shows."""
    counts = torch.full((table.experts,), -7, dtype=torch.int32)
    return torch.full_like(ids, -7), counts


@UNHURRIED
@given(batches(), WORD, WORD, st.integers(0, 2**40))
def test_route_hashed_equals_reference(
    batch: tuple[routing.RoutingTable, torch.Tensor], rank: int, layer: int, step: int
) -> None:
    table, ids = batch
    slots, counts = outputs(table, ids)
    _native.route_hashed(ids, *arrays(table), rank, layer, step, slots, counts)
    expected = routing.route_hashed(ids, table, rank, layer, step)
    assert slots.tolist() == expected[0].tolist()
    assert counts.tolist() == expected[1].tolist()


@UNHURRIED
@given(batches(), WORD, WORD)
def test_route_apportioned_equals_reference(
    batch: tuple[routing.RoutingTable, torch.Tensor], rank: int, layer: int
) -> None:
    table, ids = batch
    slots, counts = outputs(table, ids)
    _native.route_apportioned(ids, *arrays(table), rank, layer, slots, counts)
    expected = routing.route_apportioned(ids, table, rank, layer)
    assert slots.tolist() == expected[0].tolist()
    assert counts.tolist() == expected[1].tolist()


@given(WORD, WORD, WORD)
def test_route_hashed_draw_on_boundary_takes_next_replica(rank: int, layer: int, step: int) -> None:
    ids = torch.zeros(1, dtype=torch.int32)
    place = ids.long() + routing.window_begin(rank, layer, step)
    draw = 256 * int(routing.draw_positions(place)) + 128
    for first, replica in ((draw, 1), (draw + 1, 0)):
        shares = torch.tensor([first, 65536 - first], dtype=torch.int32)
        table = routing.build_table(torch.zeros(2, dtype=torch.int32), shares, 1)
        slots, counts = outputs(table, ids)
        _native.route_hashed(ids, *arrays(table), rank, layer, step, slots, counts)
        assert slots.tolist() == [replica]
        assert routing.route_hashed(ids, table, rank, layer, step)[0].tolist() == [replica]


@UNHURRIED
@given(batches())
def test_count_experts_ignores_padding(batch: tuple[routing.RoutingTable, torch.Tensor]) -> None:
    table, ids = batch
    _, counts = outputs(table, ids)
    _native.count_experts(ids, counts)
    assert counts.tolist() == [ids.tolist().count(expert) for expert in range(table.experts)]
    assert counts.tolist() == routing.count_experts(ids, table.experts).tolist()


@UNHURRIED
@given(tables(), st.integers(0, 50_000), WORD)
def test_route_apportioned_quotas_are_within_one_of_share(
    table: routing.RoutingTable, count: int, rank: int
) -> None:
    ids = torch.zeros(count, dtype=torch.int32)
    slots, counts = outputs(table, ids)
    _native.route_apportioned(ids, *arrays(table), rank, 0, slots, counts)
    run = slice(0, int(table.start[1]))
    shares = np.diff(table.cumulative[run].numpy(), prepend=0)
    quotas = np.bincount(slots.numpy(), minlength=table.slots)[table.replicas[run].numpy()]
    assert quotas.sum() == count
    assert (np.abs(quotas * 65536 - shares.astype(np.int64) * count) < 65536).all()


def test_route_hashed_treats_numpy_and_torch_alike() -> None:
    table = routing.build_table(
        torch.tensor([0, 1, 0], dtype=torch.int32),
        torch.tensor([10_000, 65536, 55_536], dtype=torch.int32),
        2,
    )
    ids = torch.arange(-1, 200, dtype=torch.int32) % 3
    results = []
    for convert in (torch.Tensor.clone, lambda t: t.clone().numpy()):
        slots, counts = (convert(out) for out in outputs(table, ids))
        start, replicas, cumulative = (convert(part) for part in arrays(table))
        _native.route_hashed(convert(ids), start, replicas, cumulative, 1, 2, 3, slots, counts)
        results.append((slots.tolist(), counts.tolist()))
    assert results[0] == results[1]


@given(
    st.lists(st.lists(st.integers(0, 200), min_size=3, max_size=3), min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(0, 2**63 - 1),
)
def test_dealt_rows_are_all_rows_and_repeat_by_seed(
    counts: list[list[int]], ranks: int, seed: int
) -> None:
    rows = np.array(counts, dtype=np.int32)
    first, again = np.full((2, len(counts), ranks, 3), -1, dtype=np.int32)
    for dealt in (first, again):
        _native.deal_rows(rows, ranks, seed, dealt)
    assert (first.sum(axis=1) == rows).all()
    assert (first >= 0).all()
    assert (first == again).all()


def test_dealt_rows_fall_on_ranks_alike() -> None:
    rows = np.full((1, 2), 50_000, dtype=np.int32)
    dealt = np.empty((1, 5, 2), dtype=np.int32)
    _native.deal_rows(rows, 5, 1, dealt)
    # Six standard deviations of a binomial count: sqrt(50000 * 0.2 * 0.8) is 89.
    assert np.abs(dealt - 10_000).max() < 6 * 89


def test_dealt_rows_refuse_another_shape() -> None:
    rows = np.zeros((1, 2), dtype=np.int32)
    with pytest.raises(ValueError, match="dealt ranks: expected 3 elements, got 4"):
        _native.deal_rows(rows, 3, 0, np.empty((1, 4, 2), dtype=np.int32))
