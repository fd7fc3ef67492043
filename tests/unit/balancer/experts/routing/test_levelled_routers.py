"""Routers that level a batch in the step: each rank by itself, or the ranks of a node together."""

from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers.processes.thread_ranks import GroupMember, on_ranks
from helpers.strategies.hypothesis_examples import few
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from equipoise.balancer.experts.agreement.members import EPGroup
from equipoise.balancer.experts.balancer import (
    ExpertBalancer,
    check_whole_batches,
    open_balancer,
)
from equipoise.balancer.experts.config import BalancerConfig, Locality, RoutingRule, ShareMode
from equipoise.balancer.experts.context import NO_REBALANCING, BalancerContext
from equipoise.balancer.experts.placement import ExpertShape, Layout, even_shares
from equipoise.hal.errors import EngineError
from equipoise.hal.levelled_routing import GroupCounts, route_levelled
from equipoise.hal.routing import RoutingTable, build_table, count_experts
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role

RANKS, NODES, LAYER = 4, 2, 1
SHAPE = ExpertShape(layers=2, experts=5, slots=8, ranks=RANKS)
PLACEMENT = np.array([[0, 1, 2, 3, 4, 0, 1, 2], [4, 0, 0, 1, 1, 2, 3, 4]], dtype=np.int32)
LAYOUT = Layout(PLACEMENT, even_shares(PLACEMENT, SHAPE.experts))
BATCH = st.lists(st.integers(-1, SHAPE.experts - 1), max_size=40)


def config(shares: ShareMode | None, **changes: object) -> BalancerConfig:
    cadence = {"window_size": 2, "step_interval": 4, "sub_window": 2, "nodes": NODES}
    return BalancerConfig(name="level", shares=shares, **(cadence | changes))  # type: ignore[arg-type]


def opened(member: GroupMember, config: BalancerConfig) -> ExpertBalancer:
    rows = torch.zeros(SHAPE.layers * SHAPE.slots_per_rank, 2)
    slots = SlotLayout(tuple((Segment("w", row),) for row in rows), staging=0)
    store = member.accelerator.slot_store(slots)
    parts = member.accelerator, member.fabric, store, SHAPE, LAYOUT, config
    return open_balancer(*parts, NO_REBALANCING)


def routed(
    member: GroupMember, batches: list[list[int]], shares: ShareMode
) -> tuple[list[int], list[int]]:
    """The slots that this rank picks for its batch, and what it counted."""
    balancer = opened(member, config(shares))
    compute, slots = member.accelerator.stream(Role.COMPUTE), []
    ids = torch.tensor(batches[member.rank], dtype=torch.int32).view(-1, 1)
    compute.launch(lambda: slots.append(balancer.router.route(LAYER, 0, ids)))
    compute.synchronize(20.0)
    counters = balancer.load.counters[LAYER].tolist()
    balancer.close()
    return slots[0].view(-1).tolist(), counters


def table() -> RoutingTable:
    placement, shares = (torch.from_numpy(part[LAYER]) for part in (PLACEMENT, LAYOUT.shares))
    return build_table(placement, shares, SHAPE.experts)


def ids_of(batch: list[int]) -> Tensor:
    return torch.tensor(batch, dtype=torch.int32)


FULL = [[0, 1, 4] * 10] * RANKS
"""Rows of the experts with two replicas only: where each row goes depends on those before it."""


@few(15)
@given(st.lists(BATCH, min_size=RANKS, max_size=RANKS))
@example(FULL)
def test_local_router_levels_the_batch_of_each_rank_by_itself(batches: list[list[int]]) -> None:
    results = on_ranks(RANKS, partial(routed, batches=batches, shares=ShareMode.LOCAL))
    for rank, (batch, (slots, counters)) in enumerate(zip(batches, results, strict=True)):
        expected, counts = route_levelled(ids_of(batch), table(), RANKS, rank, LAYER)
        assert slots == expected.tolist()
        assert counters == counts.tolist()


@few(15)
@given(st.lists(BATCH, min_size=RANKS, max_size=RANKS))
@example(FULL)
def test_node_router_levels_the_batches_of_a_node_together(batches: list[list[int]]) -> None:
    results = on_ranks(RANKS, partial(routed, batches=batches, shares=ShareMode.NODE))
    counts = torch.stack([count_experts(ids_of(batch), SHAPE.experts) for batch in batches])
    for rank, (batch, (slots, counters)) in enumerate(zip(batches, results, strict=True)):
        node, first = rank // 2, rank // 2 * 2
        group = GroupCounts(counts[first : first + 2].sum(0).int(), counts[first:rank].sum(0).int())
        expected, _ = route_levelled(ids_of(batch), table(), RANKS, node, LAYER, group)
        assert slots == expected.tolist()
        assert counters == counts[rank].tolist()


def routed_alone(member: GroupMember) -> list[int]:
    """The last rank routes a batch in every layer, and the others none at all."""
    balancer = opened(member, config(ShareMode.LOCAL))
    compute, slots = member.accelerator.stream(Role.COMPUTE), []
    ids = torch.zeros(6, 1, dtype=torch.int32)

    def route(layer: int) -> None:
        slots.append(balancer.router.route(layer, 0, ids))

    for layer in range(SHAPE.layers if member.rank == RANKS - 1 else 0):
        compute.launch(partial(route, layer))
    compute.synchronize(20.0)
    balancer.close()
    return [part.numel() for part in slots]


def test_local_router_waits_for_no_rank_that_is_idle() -> None:
    assert on_ranks(RANKS, routed_alone) == [[], [], [], [6, 6]]


def communicators_of(member: GroupMember, shares: ShareMode) -> int:
    balancer = opened(member, config(shares))
    number = len(balancer.communicators)
    balancer.close()
    return number


def test_local_shares_open_no_communicator_of_their_own() -> None:
    """Only that of the sums of load, as static shares do; node and exact shares have one more."""
    numbers = {
        shares: set(on_ranks(RANKS, partial(communicators_of, shares=shares)))
        for shares in ShareMode
    }
    assert numbers == {
        ShareMode.STATIC: {1},
        ShareMode.LAGGED: {1},
        ShareMode.LOCAL: {1},
        ShareMode.NODE: {2},
        ShareMode.EXACT: {2},
    }


def one_rank_mode(member: GroupMember, on_device: bool) -> ShareMode | None:
    """On a single rank, where a patch of the kernels' class disturbs no other."""
    shape = ExpertShape(layers=1, experts=2, slots=2, ranks=1)
    placement = np.array([[0, 1]], dtype=np.int32)
    layout = Layout(placement, even_shares(placement, 2))
    slots = SlotLayout(tuple((Segment("w", row),) for row in torch.zeros(2, 2)), staging=0)
    store = member.accelerator.slot_store(slots)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(member.accelerator.kernels), "levels_on_device", on_device)
        balancer = open_balancer(
            member.accelerator,
            member.fabric,
            store,
            shape,
            layout,
            config(None, nodes=1),
            NO_REBALANCING,
        )
    balancer.close()
    return balancer.context.config.shares


@pytest.mark.parametrize(
    ("on_device", "mode"), [(True, ShareMode.LOCAL), (False, ShareMode.LAGGED)]
)
def test_default_share_mode_is_local_where_the_device_levels(
    on_device: bool, mode: ShareMode
) -> None:
    assert on_ranks(1, partial(one_rank_mode, on_device=on_device)) == [mode]


def test_default_share_mode_with_rule_of_another_engine_is_static() -> None:
    assert config(None, routing_rule=RoutingRule.VLLM_ROW_HASH).shares is ShareMode.STATIC


@pytest.mark.parametrize("sharing", [3, 4])
def test_node_shares_refuse_rows_that_ranks_of_two_nodes_share(sharing: int) -> None:
    def refused(member: GroupMember) -> str:
        with pytest.raises(EngineError) as error:
            opened(member, config(ShareMode.NODE, ranks_sharing_rows=sharing))
        return str(error.value)

    message = (
        f"shares node level the rows of 2 ranks together, but {sharing} ranks route the same rows"
    )
    assert on_ranks(RANKS, refused) == [message] * RANKS


def routed_in_pairs(member: GroupMember, batches: list[list[int]]) -> list[int]:
    """The slots of this rank's batch, which its neighbour has, too; exact shares."""
    balancer = opened(member, config(ShareMode.EXACT, ranks_sharing_rows=2, nodes=1))
    compute, slots = member.accelerator.stream(Role.COMPUTE), []
    ids = torch.tensor(batches[member.rank // 2], dtype=torch.int32).view(-1, 1)
    compute.launch(lambda: slots.append(balancer.router.route(LAYER, 0, ids)))
    compute.synchronize(20.0)
    balancer.close()
    chosen: list[int] = slots[0].view(-1).tolist()
    return chosen


def test_exact_router_counts_the_rows_of_two_pairs_of_ranks_once_each() -> None:
    batches = [[0, 1, 4] * 10, [0, 0, 1] * 8]
    results = on_ranks(RANKS, partial(routed_in_pairs, batches=batches))
    counts = torch.stack([count_experts(ids_of(batch), SHAPE.experts) for batch in batches]).int()
    for rank, slots in enumerate(results):
        pair = rank // 2
        group = GroupCounts(counts.sum(0).int(), counts[:pair].sum(0).int())
        expected, _ = route_levelled(ids_of(batches[pair]), table(), RANKS, 0, LAYER, group)
        assert slots == expected.tolist()


def counts_known(member: GroupMember, settings: BalancerConfig) -> bool:
    """Whether the router of such a balancer knows what all ranks send."""
    balancer = opened(member, settings)
    compute, known = member.accelerator.stream(Role.COMPUTE), []
    ids = torch.zeros(4, 1, dtype=torch.int32)

    def route() -> None:
        balancer.router.route(LAYER, 0, ids)
        known.append(balancer.router.dispatch_counts(LAYER) is not None)

    compute.launch(route)
    compute.synchronize(20.0)
    balancer.close()
    return known[0]


COUNTS_KNOWN = {
    "exact": (config(ShareMode.EXACT), True),
    "node, one node": (config(ShareMode.NODE, nodes=1), True),
    "node, two nodes": (config(ShareMode.NODE), False),
    "exact, rows shared": (config(ShareMode.EXACT, ranks_sharing_rows=2), False),
    "exact, own rank first": (config(ShareMode.EXACT, locality=Locality.PREFER), False),
    "local": (config(ShareMode.LOCAL), False),
    "static": (config(ShareMode.STATIC), False),
    "row hash": (config(ShareMode.STATIC, routing_rule=RoutingRule.VLLM_ROW_HASH), False),
    "block turns": (config(ShareMode.STATIC, routing_rule=RoutingRule.TRTLLM_ROUND_ROBIN), False),
}


@pytest.mark.parametrize(("settings", "known"), COUNTS_KNOWN.values(), ids=COUNTS_KNOWN.keys())
def test_dispatch_counts_are_known_where_counts_of_all_ranks_are_gathered(
    settings: BalancerConfig, known: bool
) -> None:
    assert on_ranks(RANKS, partial(counts_known, settings=settings)) == [known] * RANKS


def refused_counts(member: GroupMember) -> list[str]:
    """The errors of dispatch counts before any route, and after that of another layer."""
    balancer = opened(member, config(ShareMode.EXACT))
    compute, messages = member.accelerator.stream(Role.COMPUTE), []

    def refused() -> None:
        with pytest.raises(EngineError) as error:
            balancer.router.dispatch_counts(LAYER)
        messages.append(str(error.value))

    def program() -> None:
        refused()
        balancer.router.route(0, 0, torch.zeros(4, 1, dtype=torch.int32))
        refused()

    compute.launch(program)
    compute.synchronize(20.0)
    balancer.close()
    return messages


def test_dispatch_counts_of_a_layer_that_was_not_routed_last_are_refused() -> None:
    message = "dispatch_counts of layer 1 follows its route; routed last: "
    assert on_ranks(RANKS, refused_counts) == [[message + "none", message + "layer 0"]] * RANKS


def context_of(settings: BalancerConfig, group: EPGroup) -> BalancerContext:
    """Of these ranks, without a device."""
    none = cast(Any, None)
    return BalancerContext(none, none, none, settings, NO_REBALANCING, none, group)


@pytest.mark.parametrize(
    ("members", "ranks_of_node"), [((0, 1, 2, 3), (2, 3)), ((0, 1, 3, 5), (3, 5)), ((3, 4), (3,))]
)
def test_ranks_of_node_are_numbers_of_the_run_after_a_loss(
    members: tuple[int, ...], ranks_of_node: tuple[int, ...]
) -> None:
    group = EPGroup(members, ranks_of_node[0])
    context = context_of(config(ShareMode.NODE), group)
    assert context.ranks_of_node == ranks_of_node


@pytest.mark.parametrize(
    ("members", "whole"),
    [((0, 1, 2, 3), True), ((2, 3), True), ((0, 2, 3), False), ((1, 2), False)],
)
def test_group_shares_refuse_ranks_of_one_batch_of_which_some_are_lost(
    members: tuple[int, ...], whole: bool
) -> None:
    group = EPGroup(members, members[0])
    settings = config(ShareMode.EXACT, ranks_sharing_rows=2, nodes=1)
    context = context_of(settings, group)
    with nullcontext() if whole else pytest.raises(EngineError, match="some are lost"):
        check_whole_batches(context)
