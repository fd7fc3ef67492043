"""What cannot work, or is not alike on all ranks, is refused before anything is opened."""

import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.processes.thread_ranks import GroupMember, on_ranks
from helpers.watchdog import WATCHDOG

from equipoise.balancer.experts.balancer import NO_REBALANCING, ExpertBalancer, open_balancer
from equipoise.balancer.experts.config import BalancerConfig, PlannerOptions, ShareMode
from equipoise.balancer.experts.placement import ExpertShape, Layout, even_shares, initial_placement
from equipoise.balancer.experts.runtime.events import Event
from equipoise.hal.errors import EquipoiseError, RanksDiffer
from equipoise.hal.slots import Segment, SlotLayout

SHAPE = ExpertShape(layers=2, experts=4, slots=6, ranks=2)
CONFIG = BalancerConfig(
    name="t",
    shares=ShareMode.STATIC,
    window_size=2,
    step_interval=4,
    sub_window=2,
    timeout=WATCHDOG,
)


@dataclass(frozen=True)
class OpenArguments:
    """The arguments that a rank opens a balancer with."""

    shape: ExpertShape = SHAPE
    config: BalancerConfig = CONFIG
    placement: Any = None
    missing_slots: int = 0
    staging: int = 2

    def open(self, member: GroupMember, **options: Any) -> ExpertBalancer:
        placement = initial_placement(SHAPE) if self.placement is None else self.placement
        layout = Layout(placement, even_shares(placement, SHAPE.experts))
        rows = torch.zeros(SHAPE.layers * SHAPE.slots_per_rank - self.missing_slots, 3)
        slots = SlotLayout(tuple((Segment("w", row),) for row in rows), self.staging)
        store = member.accelerator.slot_store(slots)
        resources = member.accelerator, member.fabric, store, self.shape, layout, self.config
        return open_balancer(*resources, **options)


MAX_STEPS = 10_000
SWAPPED = np.ascontiguousarray(np.roll(initial_placement(SHAPE), 1, axis=1))
IMPOSSIBLE: dict[str, tuple[OpenArguments, str]] = {
    "a shape of more ranks": (
        OpenArguments(shape=ExpertShape(2, 4, 6, 3)),
        "the shape is of 3 ranks, the group of 2",
    ),
    "a slot is missing": (
        OpenArguments(missing_slots=1),
        "the store has 5 slots; 2 layers of 3 slots a rank take 6",
    ),
    "no staging": (OpenArguments(staging=0), "needs a store with staging"),
    "nothing survives": (
        OpenArguments(config=replace(CONFIG, planner=PlannerOptions(survive=1))),
        "survive=1 needs two slots an expert: 8, not 6",
    ),
    "another layout": (
        OpenArguments(placement=initial_placement(ExpertShape(3, 4, 6, 2))),
        r"a placement is int32 \(2, 6\), got int32 \(3, 6\)",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_open_balancer_refuses_impossible_start(name: str) -> None:
    opening, message = IMPOSSIBLE[name]

    def program(member: GroupMember) -> None:
        with pytest.raises(EquipoiseError, match=message):
            opening.open(member)

    on_ranks(2, program)


DIFFERENCES: dict[str, tuple[OpenArguments, str]] = {
    "layout": (OpenArguments(placement=SWAPPED), "differ in layout"),
    "interval": (
        OpenArguments(config=replace(CONFIG, step_interval=6)),
        "step_interval: rank 0 has 4; rank 1 has 6",
    ),
    "shares": (
        OpenArguments(config=replace(CONFIG, shares=ShareMode.LAGGED)),
        r"differ in config.shares: .*lagged",
    ),
    "staging": (OpenArguments(staging=3), "differ in staging: rank 0 has 2; rank 1 has 3"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_open_balancer_names_settings_that_differ_between_ranks(name: str) -> None:
    other, message = DIFFERENCES[name]
    threads = threading.active_count()

    def program(member: GroupMember) -> None:
        with pytest.raises(RanksDiffer, match=message):
            (other if member.rank else OpenArguments()).open(member)

    on_ranks(2, program)
    assert threading.active_count() <= threads + 2, "the store of the group may still end"


def test_open_static_refuses_ranks_with_different_layouts() -> None:
    def program(member: GroupMember) -> None:
        placement = SWAPPED if member.rank else initial_placement(SHAPE)
        layout = Layout(placement, even_shares(placement, SHAPE.experts))
        rows = torch.zeros(SHAPE.layers * SHAPE.slots_per_rank, 3)
        slots = SlotLayout(tuple((Segment("w", row),) for row in rows), 0)
        store = member.accelerator.slot_store(slots)
        resources = member.accelerator, member.fabric, store
        with pytest.raises(RanksDiffer, match="differ in layout"):
            open_balancer(*resources, SHAPE, layout, CONFIG, NO_REBALANCING)

    on_ranks(2, program)


class CountingSink:
    """An event sink that counts its events."""

    def __init__(self) -> None:
        self.count = 0

    def emit(self, entry: Event) -> None:
        self.count += 1


@pytest.mark.parametrize("rank_with_sink", [0, 1])
def test_event_sink_may_be_attached_to_one_rank_only(rank_with_sink: int) -> None:
    """All ranks then sum the load that the sink receives: a sum takes all of them."""

    def program(member: GroupMember) -> tuple[int, list[str]]:
        sink = CountingSink()
        options = {"event_sink": sink} if member.rank == rank_with_sink else {}
        balancer = OpenArguments(config=replace(CONFIG, step_interval=8)).open(member, **options)
        lockstep = member.fabric.open("lockstep")
        for step in range(MAX_STEPS):
            with balancer.step(step):
                balancer.load.counters += torch.tensor((1, 1, 1, 40), dtype=torch.int32)
            lockstep.barrier().result(20.0)
            if balancer.engine.reports:  # rebalances end at the same step on all ranks
                break
        balancer.close()
        assert bool(balancer.engine.uncollected) == (member.rank == 0), "the lowest rank forgets"
        return sink.count, [report.outcome for report in balancer.engine.reports]

    rank_results = on_ranks(2, program)
    assert rank_results[rank_with_sink][0] > 0
    assert rank_results[1 - rank_with_sink][0] == 0
    assert rank_results[0][1] == rank_results[1][1] != []
    assert {*rank_results[0][1]} == {"committed"}


def test_log_settings_may_differ_between_ranks() -> None:
    def program(member: GroupMember) -> list[list[int]]:
        rank_config = replace(CONFIG, log_balancedness=True) if member.rank == 0 else CONFIG
        options = {"event_sink": CountingSink()} if member.rank == 0 else {}
        balancer = OpenArguments(config=rank_config).open(member, **options)
        with balancer.step(0):
            placement: list[list[int]] = balancer.serving_state.layout.placement.tolist()
        balancer.close()
        return placement

    assert on_ranks(2, program) == [initial_placement(SHAPE).tolist()] * 2
