"""Rows stay on their rank as far as level ranks allow, and not at their expense."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equipoise.balancer.experts.config import BalancerConfig, Locality, ShareMode
from equipoise.balancer.experts.routing import local_first
from equipoise.balancer.experts.routing.local_first import ReplicaRuns, local_first_shares
from equipoise.hal.errors import ConfigError
from equipoise.hal.kernels import Salt
from equipoise.hal.routing import (
    SHARE_ONE,
    RoutingTable,
    build_table,
    route_apportioned,
    solve_shares,
)

pytestmark = pytest.mark.slow

LAYER = 3


@dataclass(frozen=True)
class Batch:
    """One layer's batch.

    Attributes:
        ranks: how many.
        table: of the layer, with shares that level the ranks for this very batch.
        counts: int64 [ranks, experts].
    """

    ranks: int
    table: RoutingTable
    counts: Tensor


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Every expert has a slot, some have several, also on one rank; ranks ask unevenly."""
    ranks, experts = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    per_rank = draw(st.integers(-(-experts // ranks), -(-experts // ranks) + 3))
    slots = ranks * per_rank
    extra = draw(st.lists(st.integers(0, experts - 1), min_size=slots, max_size=slots))
    slot_experts = draw(st.permutations(list(range(experts)) + extra[experts:]))
    rank_counts = st.lists(
        st.integers(0, 40) | st.integers(0, 400), min_size=experts, max_size=experts
    )
    counts = torch.tensor(draw(st.lists(rank_counts, min_size=ranks, max_size=ranks)))
    placement = torch.tensor(slot_experts, dtype=torch.int32)
    shares = solve_shares(counts.sum(0)[None], placement[None], ranks)[0]
    return Batch(ranks, build_table(placement, shares, experts), counts)


def ids_of(counts: Tensor, seed: int) -> Tensor:
    """A rank's rows in some order, int32, with padding among them."""
    ids = torch.repeat_interleave(torch.arange(counts.numel()), counts).int()
    padded_ids = torch.cat((ids, torch.full((3,), -1, dtype=torch.int32)))
    return padded_ids[
        torch.randperm(padded_ids.numel(), generator=torch.Generator().manual_seed(seed))
    ]


def rows_by_slot(batch: Batch, rank: int) -> Tensor:
    """Rows that a rank sends to each slot, int64 [slots + 1]; the last are padding."""
    table, salt = batch.table, Salt(rank, LAYER, step=9)
    own = local_first_shares(batch.counts, table.start, table.replicas, table.cumulative, salt)
    local = RoutingTable(table.start, table.replicas, own)
    ids = ids_of(batch.counts[rank], rank)
    slots, row_counts = route_apportioned(ids, local, rank, LAYER)
    assert row_counts.tolist() == batch.counts[rank].tolist()
    return torch.bincount(slots, minlength=table.slots + 1)


def quotas(batch: Batch) -> Tensor:
    """Rows that each slot takes in all, int64 [slots]."""
    table = batch.table
    runs = ReplicaRuns.of(table.start, table.replicas, batch.ranks)
    by_entry = local_first._quotas(batch.counts.sum(0), runs, table.cumulative, LAYER)
    return torch.zeros(table.slots, dtype=torch.int64).index_add(0, table.replicas.long(), by_entry)


@given(batches())
def test_local_routing_sends_each_replica_its_share_within_one_row(batch: Batch) -> None:
    sent_rows = torch.stack([rows_by_slot(batch, rank) for rank in range(batch.ranks)])
    quota = quotas(batch)
    assert sent_rows[:, :-1].sum(0).tolist() == quota.tolist()
    assert sent_rows[:, -1].tolist() == [3] * batch.ranks
    exact = torch.zeros(batch.table.slots, dtype=torch.float64)
    runs, cumulative = (
        ReplicaRuns.of(batch.table.start, batch.table.replicas, batch.ranks),
        batch.table.cumulative,
    )
    shares = cumulative - torch.where(runs.first_of_expert, 0, cumulative.roll(1))
    exact[batch.table.replicas.long()] = (
        shares.double() * batch.counts.sum(0)[runs.expert] / SHARE_ONE
    )
    assert bool(((quota - exact).abs() < 1).all()), "within one row of the exact share"


@given(batches())
def test_local_routing_keeps_as_many_rows_home_as_possible(batch: Batch) -> None:
    table, quota = batch.table, quotas(batch)
    slot_experts = torch.empty(table.slots, dtype=torch.int64)
    runs = ReplicaRuns.of(table.start, table.replicas, batch.ranks)
    slot_experts[table.replicas.long()] = runs.expert
    for rank in range(batch.ranks):
        sent_rows = rows_by_slot(batch, rank)[:-1]
        is_own_slot = torch.arange(table.slots) // (table.slots // batch.ranks) == rank
        for expert in range(table.experts):
            is_local_replica = is_own_slot & (slot_experts == expert)
            most = min(int(batch.counts[rank, expert]), int(quota[is_local_replica].sum()))
            assert int(sent_rows[is_local_replica].sum()) == most


@given(batches())
def test_local_routing_sends_rows_to_replicas_of_their_expert(batch: Batch) -> None:
    table = batch.table
    runs = ReplicaRuns.of(table.start, table.replicas, batch.ranks)
    for rank in range(batch.ranks):
        sent_rows = rows_by_slot(batch, rank)[:-1]
        of_expert = torch.zeros(table.experts, dtype=torch.int64)
        of_expert.index_add_(0, runs.expert, sent_rows[table.replicas.long()])
        assert of_expert.tolist() == batch.counts[rank].tolist()


def test_local_routing_keeps_all_rows_home_when_every_rank_has_a_copy() -> None:
    placement = torch.tensor([0, 0, 0, 0], dtype=torch.int32)
    shares = torch.tensor([16384] * 4, dtype=torch.int32)
    batch = Batch(4, build_table(placement, shares, 1), torch.tensor([[10]] * 4))
    for rank in range(4):
        assert rows_by_slot(batch, rank)[rank] == 10


def test_local_routing_divides_large_batches_within_four_rows() -> None:
    placement = torch.tensor([0, 0], dtype=torch.int32)
    shares = torch.tensor([40000, 25536], dtype=torch.int32)
    batch = Batch(2, build_table(placement, shares, 1), torch.tensor([[150_000], [90_001]]))
    sent_rows = torch.stack([rows_by_slot(batch, rank) for rank in range(2)])[:, :-1]
    assert sent_rows.sum(1).tolist() == [150_000, 90_001]
    assert int((sent_rows.sum(0) - quotas(batch)).abs().max()) <= 4


@pytest.mark.parametrize("mode", [ShareMode.STATIC, ShareMode.LAGGED])
def test_locality_requires_exact_shares(mode: ShareMode) -> None:
    with pytest.raises(ConfigError, match="shares must be exact"):
        BalancerConfig(
            name="local",
            shares=mode,
            locality=Locality.PREFER,
            window_size=2,
            step_interval=2,
            sub_window=1,
        )
