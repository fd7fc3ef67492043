"""What cannot work, or is not alike on all ranks, is refused before anything is opened."""

import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.processes.thread_ranks import GroupMember, on_ranks

from equipoise.balancer.experts.balancer import NO_REBALANCING, ExpertBalancer, open_balancer
from equipoise.balancer.experts.config import BalancerConfig, PlannerOptions, ShareMode
from equipoise.balancer.experts.placement import ExpertShape, Layout, even_shares, initial_placement
from equipoise.balancer.experts.runtime.events import Event
from equipoise.hal.errors import EquipoiseError, RanksDiffer
from equipoise.hal.slots import Segment, SlotLayout

SHAPE = ExpertShape(layers=2, experts=4, slots=6, ranks=2)
CONFIG = BalancerConfig(
    name="t", shares=ShareMode.STATIC, window_size=2, step_interval=4, sub_window=2, timeout=8.0
)


@dataclass(frozen=True)
class Given:
    """What a rank opens a balancer with."""

    shape: ExpertShape = SHAPE
    config: BalancerConfig = CONFIG
    placement: Any = None
    missing: int = 0
    staging: int = 2

    def open(self, member: GroupMember, **more: Any) -> ExpertBalancer:
        placement = initial_placement(SHAPE) if self.placement is None else self.placement
        layout = Layout(placement, even_shares(placement, SHAPE.experts))
        rows = torch.zeros(SHAPE.layers * SHAPE.slots_per_rank - self.missing, 3)
        slots = SlotLayout(tuple((Segment("w", row),) for row in rows), self.staging)
        store = member.accelerator.slot_store(slots)
        ends = member.accelerator, member.fabric, store, self.shape, layout, self.config
        return open_balancer(*ends, **more)


MOST_STEPS = 10_000
TURNED = np.ascontiguousarray(np.roll(initial_placement(SHAPE), 1, axis=1))
CANNOT: dict[str, tuple[Given, str]] = {
    "a shape of more ranks": (
        Given(shape=ExpertShape(2, 4, 6, 3)),
        "the shape is of 3 ranks, the group of 2",
    ),
    "a slot is missing": (
        Given(missing=1),
        "the store has 5 slots; 2 layers of 3 slots a rank take 6",
    ),
    "no staging": (Given(staging=0), "needs a store with staging"),
    "nothing survives": (
        Given(config=replace(CONFIG, planner=PlannerOptions(survive=1))),
        "survive=1 needs two slots an expert: 8, not 6",
    ),
    "another layout": (
        Given(placement=initial_placement(ExpertShape(3, 4, 6, 2))),
        r"a placement is int32 \(2, 6\), got int32 \(3, 6\)",
    ),
}


@pytest.mark.parametrize("name", CANNOT)
def test_open_balancer_refuses_impossible_start(name: str) -> None:
    given, message = CANNOT[name]

    def program(member: GroupMember) -> None:
        with pytest.raises(EquipoiseError, match=message):
            given.open(member)

    on_ranks(2, program)


DIFFER: dict[str, tuple[Given, str]] = {
    "layout": (Given(placement=TURNED), "differ in layout"),
    "interval": (
        Given(config=replace(CONFIG, step_interval=6)),
        "step_interval: rank 0 has 4; rank 1 has 6",
    ),
    "shares": (
        Given(config=replace(CONFIG, shares=ShareMode.LAGGED)),
        r"differ in config.shares: .*lagged",
    ),
    "staging": (Given(staging=3), "differ in staging: rank 0 has 2; rank 1 has 3"),
}


@pytest.mark.parametrize("name", DIFFER)
def test_open_balancer_names_settings_that_differ_between_ranks(name: str) -> None:
    other, message = DIFFER[name]
    threads = threading.active_count()

    def program(member: GroupMember) -> None:
        with pytest.raises(RanksDiffer, match=message):
            (other if member.rank else Given()).open(member)

    on_ranks(2, program)
    assert threading.active_count() <= threads + 2, "the store of the group may still end"


def test_open_static_refuses_ranks_with_different_layouts() -> None:
    def program(member: GroupMember) -> None:
        placement = TURNED if member.rank else initial_placement(SHAPE)
        layout = Layout(placement, even_shares(placement, SHAPE.experts))
        rows = torch.zeros(SHAPE.layers * SHAPE.slots_per_rank, 3)
        slots = SlotLayout(tuple((Segment("w", row),) for row in rows), 0)
        store = member.accelerator.slot_store(slots)
        ends = member.accelerator, member.fabric, store
        with pytest.raises(RanksDiffer, match="differ in layout"):
            open_balancer(*ends, SHAPE, layout, CONFIG, NO_REBALANCING)

    on_ranks(2, program)


class Heard:
    """A journal that counts."""

    def __init__(self) -> None:
        self.count = 0

    def emit(self, entry: Event) -> None:
        self.count += 1


@pytest.mark.parametrize("watched", [0, 1])
def test_event_sink_may_be_attached_to_one_rank_only(watched: int) -> None:
    """All ranks then sum what the journal is told: a sum takes all of them."""

    def program(member: GroupMember) -> tuple[int, list[str]]:
        heard = Heard()
        more = {"event_sink": heard} if member.rank == watched else {}
        balancer = Given(config=replace(CONFIG, step_interval=8)).open(member, **more)
        lockstep = member.fabric.open("lockstep")
        for step in range(MOST_STEPS):
            with balancer.step(step):
                balancer.load.counters += torch.tensor((1, 1, 1, 40), dtype=torch.int32)
            lockstep.barrier().result(20.0)
            if balancer.engine.reports:  # rebalances end at the same step on all ranks
                break
        balancer.close()
        assert bool(balancer.engine.uncollected) == (member.rank == 0), "the lowest rank forgets"
        return heard.count, [report.outcome for report in balancer.engine.reports]

    told = on_ranks(2, program)
    assert told[watched][0] > 0
    assert told[1 - watched][0] == 0
    assert told[0][1] == told[1][1] != []
    assert {*told[0][1]} == {"committed"}


def test_log_settings_may_differ_between_ranks() -> None:
    def program(member: GroupMember) -> list[list[int]]:
        logs = replace(CONFIG, log_balancedness=True) if member.rank == 0 else CONFIG
        more = {"event_sink": Heard()} if member.rank == 0 else {}
        balancer = Given(config=logs).open(member, **more)
        with balancer.step(0):
            installed: list[list[int]] = balancer.serving_state.layout.placement.tolist()
        balancer.close()
        return installed

    assert on_ranks(2, program) == [initial_placement(SHAPE).tolist()] * 2
