"""Ranks that route the same rows pick the same replicas."""

from functools import partial

import pytest
import torch
from helpers.processes.thread_ranks import GroupMember, on_ranks
from helpers.strategies.hypothesis_examples import few
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.balancer import open_balancer
from equipoise.balancer.experts.config import BalancerConfig, Locality, ShareMode
from equipoise.balancer.experts.placement import ExpertShape, Layout, even_shares, initial_placement
from equipoise.hal.errors import ConfigError
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role

SHAPE = ExpertShape(layers=1, experts=4, slots=8, ranks=2)
LAYOUT = Layout(initial_placement(SHAPE), even_shares(initial_placement(SHAPE), SHAPE.experts))
ROWS = st.lists(st.integers(0, SHAPE.experts - 1), min_size=1, max_size=64)


def config(
    shares: ShareMode, ranks_alike: int, locality: Locality = Locality.ANY
) -> BalancerConfig:
    return BalancerConfig(
        name="alike",
        shares=shares,
        window_size=2,
        step_interval=4,
        sub_window=2,
        ranks_sharing_rows=ranks_alike,
        locality=locality,
    )


def picked_slots(
    member: GroupMember, rows: list[int], shares: ShareMode, ranks_alike: int
) -> list[int]:
    """The slots that this rank picks for rows that all ranks have."""
    slots = SlotLayout(tuple((Segment("w", row),) for row in torch.zeros(4, 2)), staging=2)
    store = member.accelerator.slot_store(slots)
    resources = member.accelerator, member.fabric, store
    balancer = open_balancer(*resources, SHAPE, LAYOUT, config(shares, ranks_alike))
    compute, routed_slots = member.accelerator.stream(Role.COMPUTE), []
    ids = torch.tensor(rows, dtype=torch.int32).view(-1, 1)
    with balancer.step(0):
        compute.launch(lambda: routed_slots.append(balancer.router.route(0, 0, ids)))
    compute.synchronize(20.0)
    balancer.close()
    slots_of_rows: list[int] = routed_slots[0].view(-1).tolist()
    return slots_of_rows


@few(15)
@given(ROWS, st.sampled_from(ShareMode))
def test_ranks_route_alike_when_rows_are_shared(rows: list[int], shares: ShareMode) -> None:
    first, second = on_ranks(2, partial(picked_slots, rows=rows, shares=shares, ranks_alike=2))
    assert first == second
    slot_experts = LAYOUT.placement[0]
    assert [slot_experts[slot] for slot in first] == rows


@pytest.mark.parametrize("shares", [ShareMode.NODE, ShareMode.EXACT])
def test_rows_that_all_ranks_share_are_levelled_once(shares: ShareMode) -> None:
    """As rows of one rank: counted twice, all of these would go to the first replica."""
    rows = [0] * 30
    first, _ = on_ranks(2, partial(picked_slots, rows=rows, shares=shares, ranks_alike=2))
    slot_experts = LAYOUT.placement[0]
    replicas = [slot for slot, expert in enumerate(slot_experts) if expert == 0]
    assert sorted(first.count(slot) for slot in replicas) == [15, 15]


def test_ranks_route_differently_when_rows_are_not_shared() -> None:
    rows = [0] * 64
    first, second = on_ranks(
        2, partial(picked_slots, rows=rows, shares=ShareMode.LAGGED, ranks_alike=1)
    )
    assert first != second


def test_engine_config_refuses_rows_alike_of_zero_or_with_locality() -> None:
    with pytest.raises(ConfigError, match="2 of them route the same rows"):
        config(ShareMode.EXACT, 2, Locality.PREFER)
    with pytest.raises(ConfigError, match="ranks_sharing_rows is at least 1"):
        config(ShareMode.LAGGED, 0)
