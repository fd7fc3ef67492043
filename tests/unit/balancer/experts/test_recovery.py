"""What is left of three ranks when one or two are gone."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from helpers.processes.thread_ranks import GroupMember, on_ranks
from helpers.strategies.engine_events import RecordingSink
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.agreement.members import EPGroup
from equipoise.balancer.experts.balancer import (
    NO_REBALANCING,
    ExpertBalancer,
    StagedFromPeers,
    open_balancer,
)
from equipoise.balancer.experts.config import BalancerConfig, PlannerOptions, ShareMode
from equipoise.balancer.experts.placement import (
    ExpertShape,
    Layout,
    Placement,
    check_placement,
    even_shares,
)
from equipoise.balancer.experts.planning.topology import topology
from equipoise.balancer.experts.recovery import (
    surviving_config,
    surviving_layout,
    surviving_nodes,
)
from equipoise.balancer.experts.runtime.events import COMPLETED, NO_EVENTS, BatchSampled
from equipoise.balancer.experts.transfer.host_writes import HostWeights, StreamWriter
from equipoise.hal.checksum import checksum
from equipoise.hal.errors import ExpertsLost, PlacementError, RanksDiffer, UsageError
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role

SHAPE = ExpertShape(layers=2, experts=4, slots=9, ranks=3)
SAFE_PLACEMENT = np.array(
    [[0, 1, 2, 2, 3, 0, 1, 3, 0], [0, 1, 2, 3, 1, 2, 0, 3, 1]], dtype=np.int32
)
"""Whatever rank is lost, every expert keeps a copy."""
FRAIL_PLACEMENT = np.array(
    [[0, 1, 2, 0, 1, 2, 3, 3, 0], [0, 1, 2, 0, 1, 2, 3, 0, 1]], dtype=np.int32
)
"""Expert 3 is on rank 2 alone."""


class NumberedWeights:
    """Every expert's weights in the host's memory: its number plus one."""

    def view(self, layer: int, expert: int) -> tuple[torch.Tensor, ...]:
        return (torch.full((5,), expert + 1.0),)

    def checksum(self, layer: int, expert: int) -> int:
        return checksum(self.view(layer, expert)[0])


@dataclass(frozen=True)
class RankAfterLoss:
    """The state of a remaining rank after the others left."""

    placement: list[list[int]]
    slot_experts: list[int]
    rebalances: int


def config() -> BalancerConfig:
    return BalancerConfig(
        name="t", shares=ShareMode.STATIC, window_size=2, step_interval=4, sub_window=2,
        timeout=20.0,  # a quarter of it is waited for ranks that have left
    )  # fmt: skip


def slots_of(rank: int, placement: Placement) -> SlotLayout:
    rank_placement = placement[:, rank * 3 : rank * 3 + 3]
    slot_rows = torch.tensor(rank_placement + 1, dtype=torch.float32).reshape(-1, 1).repeat(1, 5)
    return SlotLayout(tuple((Segment("weight", row),) for row in slot_rows), staging=6)


def serve(balancer: ExpertBalancer, member: GroupMember, ranks: list[int], steps: range) -> None:
    lockstep = member.fabric.open(f"lockstep{steps.start}", ranks)
    for step in steps:
        balancer.before_step(step)
        balancer.load.counters += torch.tensor((1, 40, 1, 1), dtype=torch.int32)
        lockstep.barrier().result(30.0)


def lose_ranks(placement: Placement, active: list[int], host: bool) -> list[RankAfterLoss | None]:
    """Runs three steps on three ranks, then sixty on the remaining ones."""

    def program(member: GroupMember) -> RankAfterLoss | None:
        weights = slots_of(member.rank, placement)
        store = member.accelerator.slot_store(weights)
        layout = Layout(placement, even_shares(placement, SHAPE.experts))
        host_weights = HostWeights(NumberedWeights(), StreamWriter(member.accelerator, store))
        path = StagedFromPeers(host_weights if host else None)
        balancer = open_balancer(
            member.accelerator, member.fabric, store, SHAPE, layout, config(), path
        )
        serve(balancer, member, [0, 1, 2], range(3))
        if member.rank not in active:
            balancer.close()
            return None
        shrunk = balancer.reconfigure(active, 3)
        serve(shrunk, member, active, range(3, 63))  # nothing is computed: a rebalance takes many
        member.accelerator.synchronize(20.0)
        shrunk.close()
        slot_experts = [int(slot[0].data[0]) - 1 for slot in weights.slots]
        placement_after = shrunk.serving_state.layout.placement.tolist()
        return RankAfterLoss(placement_after, slot_experts, len(shrunk.engine.reports))

    return on_ranks(3, program)


@pytest.mark.parametrize("step", [3, 4])
def test_reconfigure_drops_load_of_short_first_sub_window(step: int) -> None:
    def program(member: GroupMember) -> set[int]:
        store = member.accelerator.slot_store(slots_of(member.rank, SAFE_PLACEMENT))
        layout = Layout(SAFE_PLACEMENT, even_shares(SAFE_PLACEMENT, SHAPE.experts))
        balancer = open_balancer(member.accelerator, member.fabric, store, SHAPE, layout, config())
        shrunk = balancer.reconfigure([0, 1, 2], step)
        rows = torch.tensor((1, 40, 1, 1), dtype=torch.int32)
        sums = set()
        for number in range(step, step + 9):
            shrunk.before_step(number)
            member.accelerator.stream(Role.COMPUTE).launch(lambda: shrunk.load.counters.add_(rows))
            sums |= {int(load[0, 1]) for load in shrunk.load.sums}
        shrunk.close()
        return sums

    # Two steps of 40 rows on three ranks; one step, or none, would be less.
    assert on_ranks(3, program) == [{240}] * 3


@pytest.mark.parametrize("step", [3, 4])
def test_reconfigure_samples_steps_of_remaining_ranks(step: int) -> None:
    sink, active = RecordingSink(), [0, 2]

    def program(member: GroupMember) -> None:
        store = member.accelerator.slot_store(slots_of(member.rank, SAFE_PLACEMENT))
        layout = Layout(SAFE_PLACEMENT, even_shares(SAFE_PLACEMENT, SHAPE.experts))
        ends = member.accelerator, member.fabric, store, SHAPE, layout, config()
        events = sink if member.rank == 2 else NO_EVENTS  # which becomes rank 1
        balancer = open_balancer(*ends, event_sink=events)
        if member.rank not in active:
            balancer.close()
            return
        shrunk = balancer.reconfigure(active, step)
        lockstep = member.fabric.open("lockstep", active)
        for number in range(step, step + 12):
            shrunk.before_step(number)
            rows = torch.tensor((number, 1, 1, member.rank), dtype=torch.int32)
            member.accelerator.stream(Role.COMPUTE).launch(partial(shrunk.load.counters.add_, rows))
            lockstep.barrier().result(30.0)
        shrunk.close()

    on_ranks(3, program)
    samples = [event for event in sink.events if isinstance(event, BatchSampled)]
    assert samples
    for sample in samples:
        rows_by_rank = [[sample.step, 1, 1, rank] for rank in active]
        assert sample.counts.tolist() == [[rows] * SHAPE.layers for rows in rows_by_rank]
        assert sample.layout.placement.shape == (SHAPE.layers, 6)
        assert sample.shape.ranks == 2


@pytest.mark.parametrize("active", [[0, 1], [0, 2], [1, 2]])
@pytest.mark.slow
def test_reconfigure_serves_every_expert_from_remaining_copies(active: list[int]) -> None:
    outcomes = lose_ranks(SAFE_PLACEMENT, active, host=False)
    survivors = [outcomes[rank] for rank in active]
    for position, after in enumerate(survivors):
        assert after is not None
        assert after.placement == survivors[0].placement  # type: ignore[union-attr]
        check_placement(np.array(after.placement, dtype=np.int32), ExpertShape(2, 4, 6, 2))
        expected_experts = [row[position * 3 : position * 3 + 3] for row in after.placement]
        assert after.slot_experts == [*chain(*expected_experts)]
        assert after.rebalances >= 3, "rebalances go on"


def test_static_balancer_stays_static_after_reconfigure() -> None:
    def program(member: GroupMember) -> list[list[list[int]]]:
        store = member.accelerator.slot_store(slots_of(member.rank, SAFE_PLACEMENT))
        layout = Layout(SAFE_PLACEMENT, even_shares(SAFE_PLACEMENT, SHAPE.experts))
        resources = member.accelerator, member.fabric, store, SHAPE, layout, config()
        balancer = open_balancer(*resources, NO_REBALANCING)
        serve(balancer, member, [0, 1, 2], range(3))
        if member.rank == 2:
            balancer.close()
            return []
        shrunk = balancer.reconfigure([0, 1], 3)
        before = shrunk.serving_state.layout
        serve(shrunk, member, [0, 1], range(3, 63))
        shrunk.close()
        after = shrunk.serving_state.layout
        assert len(shrunk.engine.reports) == 0
        return [array.tolist() for one in (before, after) for array in (one.placement, one.shares)]

    for placement, shares, *later in on_ranks(3, program)[:2]:
        assert later == [placement, shares]


@pytest.mark.slow
def test_reconfigure_restores_lost_experts_from_host() -> None:
    outcomes = lose_ranks(FRAIL_PLACEMENT, [0, 1], host=True)
    for position, after in enumerate(outcomes[:2]):
        assert after is not None
        check_placement(np.array(after.placement, dtype=np.int32), ExpertShape(2, 4, 6, 2))
        expected_experts = [row[position * 3 : position * 3 + 3] for row in after.placement]
        assert after.slot_experts == [*chain(*expected_experts)]


def test_reconfigure_names_experts_without_any_copy() -> None:
    with pytest.raises(ExpertsLost, match=r"layer 0: \[3\]; layer 1: \[3\]") as error:
        lose_ranks(FRAIL_PLACEMENT, [0, 1], host=False)
    assert error.value.lost_experts == {0: (3,), 1: (3,)}


def test_reconfigure_refuses_too_few_slots() -> None:
    with pytest.raises(PlacementError, match="3 slots cannot hold 4 experts"):
        lose_ranks(SAFE_PLACEMENT, [2], host=True)


def test_reconfigure_refuses_ranks_with_different_steps() -> None:
    def program(member: GroupMember) -> str:
        store = member.accelerator.slot_store(slots_of(member.rank, SAFE_PLACEMENT))
        layout = Layout(SAFE_PLACEMENT, even_shares(SAFE_PLACEMENT, SHAPE.experts))
        balancer = open_balancer(member.accelerator, member.fabric, store, SHAPE, layout, config())
        if member.rank == 2:
            balancer.close()
            return ""
        with pytest.raises(
            RanksDiffer, match="differ in step: rank 0 has 3; rank 1 has 4"
        ) as error:
            balancer.reconfigure([0, 1], 3 + member.rank)
        return str(error.value)

    assert all(on_ranks(3, program)[:2])


@pytest.mark.parametrize(
    ("experts", "survive"), [(3, 1), (4, 0)], ids=["enough slots are left", "too few are left"]
)
def test_reconfigure_continues_rebalances_with_less_redundancy(
    experts: int, survive: int, caplog: pytest.LogCaptureFixture
) -> None:
    shape = ExpertShape(layers=2, experts=experts, slots=9, ranks=3)
    row = [0, 0, 1, 2, 2, 1, 0, 1, 2] if experts == 3 else [0, 1, 2, 3, 0, 1, 2, 3, 0]
    placement = np.array([row] * 2, dtype=np.int32)

    def program(member: GroupMember) -> tuple[list[str], int, list[object]] | None:
        store = member.accelerator.slot_store(slots_of(member.rank, placement))
        layout = Layout(placement, even_shares(placement, experts))
        rank_config = replace(config(), planner=PlannerOptions(survive=1))
        balancer = open_balancer(
            member.accelerator, member.fabric, store, shape, layout, rank_config
        )
        if member.rank == 2:
            balancer.close()
            return None
        shrunk = balancer.reconfigure([0, 1], 0)
        lockstep = member.fabric.open("lockstep", [0, 1])
        for step in range(96):  # many: plans are made meanwhile, on a machine that may be busy
            shrunk.before_step(step)
            shrunk.load.counters += torch.tensor((1, 40, 1, 1)[:experts], dtype=torch.int32)
            lockstep.barrier().result(30.0)
        shrunk.close()
        outcomes = [report.outcome for report in shrunk.engine.reports]
        planner_options, final_placement = (
            shrunk.context.config.planner,
            shrunk.serving_state.layout.placement,
        )
        under_replicated = topology(
            shrunk.shape, 1, planner_options.survive, None
        ).under_replicated(final_placement)
        return outcomes, planner_options.survive, under_replicated.tolist()

    for outcomes, final_survive, under_replicated in [
        result for result in on_ranks(3, program) if result is not None
    ]:
        assert final_survive == survive
        assert under_replicated == [], "whose experts were on one rank only is planned anew"
        assert outcomes
        assert set(outcomes) <= {*COMPLETED}, "nothing is aborted"
    assert ("survive is 0 from now on" in caplog.text) == (survive == 0)


@given(
    st.permutations([0, 1, 2, 3, 0, 1, 2, 3, 0]),
    st.sets(st.integers(0, 2), min_size=2, max_size=2),
)
def test_salvage_holds_every_expert_and_keeps_remaining_slots(
    row: list[int], active: set[int]
) -> None:
    shape = ExpertShape(layers=1, experts=4, slots=9, ranks=3)
    placement = np.array([row], dtype=np.int32)
    own = min(active)
    before = EPGroup((0, 1, 2), own)
    layout = Layout(placement, even_shares(placement, 4))
    surviving = surviving_layout(layout, shape, before, before.shrunk_to(sorted(active)))
    check_placement(surviving.layout.placement, surviving.shape)
    remaining = [row[rank * 3 + place] for rank in sorted(active) for place in range(3)]
    reloaded = {refill.slot: refill.expert for refill in surviving.reloads}
    assert len(reloaded) == 4 - len(set(remaining)), "only what was lost is written"
    for slot, expert in enumerate(surviving.layout.placement[0].tolist()):
        assert expert == reloaded.get(slot, remaining[slot])
    assert not set(reloaded.values()) & set(remaining)


@pytest.mark.parametrize(
    ("ranks", "nodes", "remaining_ranks", "expected"),
    [
        (4, 2, [0, 1], 1),
        (4, 2, [0, 2], 2),
        (4, 2, [0, 1, 3], 1),
        (8, 4, [2, 3, 4, 5, 6, 7], 3),
        (8, 4, [1, 2, 3, 4, 5, 6], 1),
        (8, 2, [0, 1, 4, 5], 2),
        (8, 2, [0, 1, 2, 4], 1),
        (3, 1, [0, 2], 1),
    ],
)
def test_surviving_nodes_are_those_of_remaining_ranks(
    ranks: int, nodes: int, remaining_ranks: list[int], expected: int
) -> None:
    before = EPGroup(tuple(range(ranks)), remaining_ranks[0])
    assert surviving_nodes(nodes, before, before.shrunk_to(remaining_ranks)) == expected


def test_members_are_ascending_and_contain_their_own_rank() -> None:
    members = EPGroup((0, 1, 2), 1)
    assert members.shrunk_to([2, 1]) == EPGroup((1, 2), 1, 1)
    assert members.shrunk_to([1]).shrunk_to([1]).scoped_name("x") == "x.2"
    with pytest.raises(UsageError, match="were no members"):
        members.shrunk_to([1, 5])
    with pytest.raises(UsageError, match="rank 1 is not one of"):
        members.shrunk_to([0, 2])


@pytest.mark.parametrize(
    ("left", "warned"), [((0, 1, 2), True), ((0, 2), False), ((2, 3), False), ((0, 1), False)]
)
def test_node_shares_warn_where_survivors_do_not_divide_by_node(
    left: tuple[int, ...], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = EPGroup((0, 1, 2, 3), left[0])
    shape = ExpertShape(layers=1, experts=2, slots=8, ranks=4)
    settings = replace(config(), shares=ShareMode.NODE, nodes=2)
    surviving_config(settings, shape, before, before.shrunk_to(left))
    assert ("do not divide by node" in caplog.text) is warned
