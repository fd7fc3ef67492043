"""Playing steps to a candidate: what plans see, when they take effect, what moves."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.config import BalancerConfig, ShareMode
from equipoise.balancer.experts.placement import (
    SHARE_ONE,
    ExpertShape,
    Layout,
    Load,
    Shares,
    initial_placement,
)
from equipoise.report.advice.dead_zone import DeadZone
from equipoise.report.advice.hardware import Expert, Roofline, find_hardware
from equipoise.report.replay.candidate import (
    COMMIT_LATENCY,
    OurCandidate,
    ProposedLayout,
    Unbalanced,
    incoming,
    with_even_shares,
)
from equipoise.report.replay.engine_model import Cadence, WindowLoad
from equipoise.report.replay.player import Link, Measurements, Player
from equipoise.report.replay.rank_rows import DrawnRows, RankRowsRule, share_parts
from equipoise.report.replay.step_price import DeadZonePrice, RooflinePrice, StepPrice
from equipoise.report.replay.steps import StepBlock

SHAPE = ExpertShape(layers=4, experts=4, slots=4, ranks=2)
SHARED = ExpertShape(layers=4, experts=2, slots=4, ranks=2)
PRICE = DeadZonePrice(DeadZone(1.0, 1.0, "test"))
ROOFLINE = RooflinePrice(Roofline(Expert(1 << 24, "fp8"), find_hardware("h200")))


@dataclass
class Swapping:
    """Plans by turns: all experts change ranks, and back again."""

    cadence: Cadence
    shape: ExpertShape = SHAPE
    name: str = "swapping"
    engine: str = "test"
    collective: bool = False
    sub_windows: int = 1
    seen: list[WindowLoad] = field(default_factory=list)

    def start(self) -> Layout:
        return with_even_shares(initial_placement(self.shape), self.shape)

    def plan(self, load: WindowLoad, installed: Layout) -> ProposedLayout:
        self.seen.append(load)
        placement = np.ascontiguousarray(installed.placement[:, ::-1])
        return ProposedLayout(with_even_shares(placement, self.shape), (2, 0, 1, 3))

    def rule(self, layout: Layout, has_tokens: bool) -> RankRowsRule:
        return DrawnRows(layout, self.shape, share_parts(layout), 0)

    def share_updates(self) -> None:
        return None


@dataclass
class Sharing(Swapping):
    """Two replicas of each of two experts; plans and updates send all rows to the first ones.

    Layer 3 has its replicas the other way round after a plan, the others stay as they are.
    """

    shape: ExpertShape = SHARED
    updates: bool = False

    def start(self) -> Layout:
        return with_even_shares(np.tile(np.array([0, 1, 0, 1], np.int32), (4, 1)), self.shape)

    def plan(self, load: WindowLoad, installed: Layout) -> ProposedLayout:
        placement = installed.placement.copy()
        placement[3] = placement[3, ::-1]
        return ProposedLayout(Layout(placement, self._first(installed.shares)), (3,))

    def share_updates(self) -> "Sharing | None":  # type: ignore[override]
        return self if self.updates else None

    def new_shares(self, load: Load, layout: Layout) -> Shares:
        return self._first(layout.shares)

    @staticmethod
    def _first(shares: Shares) -> Shares:
        first = np.zeros_like(shares)
        first[:, :2] = SHARE_ONE
        return first


def cadence(
    window: int, interval: int, first: int, layers: int | None = None, blocking: bool = False
) -> Cadence:
    return Cadence(window, interval, first, layers, blocking, "test")


def hot_expert(steps: int) -> StepBlock:
    """All rows are of expert 0: step n has n + 1."""
    counts = np.zeros((steps, SHAPE.layers, SHAPE.experts), np.int32)
    counts[:, :, 0] = np.arange(1, steps + 1)[:, None]
    return StepBlock(0, counts)


def played(
    candidate: Swapping,
    steps: int,
    link: Link | None = None,
    sizes: list[int] | None = None,
    price: StepPrice = PRICE,
) -> Measurements:
    player, block = Player(candidate, price, link=link), hot_expert(steps)
    first = 0
    for size in sizes or [steps]:
        last = min(first + size, steps)
        player.play(StepBlock(first, block.counts[first:last]))
        first = last
    return player.measured


@pytest.mark.parametrize(
    ("window", "interval", "first", "windows"),
    [
        (2, 5, 5, [(3, 4), (8, 9)]),
        (5, 5, 5, [range(5), range(5, 10)]),
        (3, 4, 2, [range(2), range(3, 6), range(7, 10)]),
    ],
)
def test_plan_sees_the_last_steps_of_its_window(
    window: int, interval: int, first: int, windows: list[range]
) -> None:
    """Where fewer have been served than a window has, it sees those."""
    candidate = Swapping(cadence(window, interval, first))
    played(candidate, 11)
    assert [load.experts[0, 0] for load in candidate.seen] == [
        sum(step + 1 for step in steps) for steps in windows
    ]
    assert [load.steps for load in candidate.seen] == [len(steps) for steps in windows]
    assert all(
        (load.slots.sum(axis=1) == load.experts.sum(axis=1)).all() for load in candidate.seen
    )


def first_rank_rows(measured: Measurements) -> float:
    return float(measured.rank_rows[0, 0])


def test_pausing_engine_serves_the_next_step_with_its_plan() -> None:
    candidate = Swapping(cadence(2, 4, 4, blocking=True))
    measured = played(candidate, 8)
    # Expert 0 was on rank 0 in the first four steps, which had 1 to 4 rows.
    assert first_rank_rows(measured) == 1 + 2 + 3 + 4
    assert [(one.planned, one.committed) for one in measured.rebalances] == [(4, 4), (8, 8)]


def test_layers_commit_one_after_the_other_in_the_order_of_the_plan() -> None:
    candidate = Swapping(cadence(2, 20, 4, layers=1))
    measured = played(candidate, 10)
    # Layer 2 commits before step 5, then layers 0, 1 and 3, each a step later.
    rows = [sum(range(1, 1 + steps)) for steps in (6, 7, 5, 8)]
    assert measured.rank_rows[:, 0].tolist() == rows
    [rebalance] = measured.rebalances
    assert (rebalance.planned, rebalance.committed, rebalance.layers) == (4, 8, 4)


def test_layers_commit_as_their_weights_come_over_the_link() -> None:
    """Two copies a layer and rank; a step has time for one."""
    link = Link(bytes_per_second=100.0, expert_bytes=10, step_seconds=0.1)
    measured = played(Swapping(cadence(2, 30, 4)), 20, link)
    [rebalance] = measured.rebalances
    assert (rebalance.copies, rebalance.busiest) == (16, 8)
    assert rebalance.committed == 4 + 1 + 8
    assert rebalance.pause == 0.0


def test_pause_is_the_transfer_of_the_busiest_rank() -> None:
    link = Link(bytes_per_second=100.0, expert_bytes=10, step_seconds=None)
    measured = played(Swapping(cadence(2, 30, 4, blocking=True)), 20, link)
    assert measured.rebalances[0].pause == pytest.approx(0.8)


def test_incoming_copies_leave_out_experts_that_only_change_slots() -> None:
    old = np.array([[0, 1, 2, 3]] * 4, np.int32)
    new = np.array([[1, 0, 2, 3], [2, 1, 0, 3], [2, 3, 0, 1], [0, 1, 3, 2]], np.int32)
    assert incoming(old, new, SHAPE).tolist() == [[0, 0], [1, 1], [2, 2], [0, 0]]


def test_only_some_steps_are_evaluated_and_all_are_counted() -> None:
    candidate = Swapping(cadence(2, 4, 4, blocking=True))
    player = Player(candidate, PRICE, every=3)
    player.play(hot_expert(9))
    assert np.concatenate(player.measured.steps).tolist() == [0, 3, 6]
    assert player.measured.served == 9
    assert candidate.seen[0].experts[0, 0] == 3 + 4


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(0, 4),
    st.sampled_from([1, 2, None]),
    st.booleans(),
    st.sampled_from([PRICE, ROOFLINE]),
)
def test_outcome_does_not_depend_on_blocks(
    sizes: list[int],
    window: int,
    longer: int,
    layers: int | None,
    blocking: bool,
    price: StepPrice,
) -> None:
    steps = sum(sizes)
    interval = window + longer
    cadence_of_case = cadence(window, interval, interval, layers, blocking)
    whole = played(Swapping(cadence_of_case), steps, price=price)
    split = played(Swapping(cadence_of_case), steps, sizes=sizes, price=price)
    assert whole.rebalances == split.rebalances
    assert (whole.rank_rows == split.rank_rows).all()
    for name in ("steps", "imbalance", "seconds"):
        one, other = (np.concatenate(getattr(found, name)) for found in (whole, split))
        assert np.array_equal(one, other, equal_nan=True)


@pytest.mark.parametrize("mode", ShareMode)
def test_our_balancer_levels_hot_experts_in_every_share_mode(mode: ShareMode) -> None:
    shape = ExpertShape(layers=2, experts=16, slots=20, ranks=4)
    chances = np.random.default_rng(0)
    odds = 1 / np.arange(1, 17)
    counts = chances.multinomial(4000, odds / odds.sum(), (40, 2)).astype(np.int32)
    config = BalancerConfig(shares=mode, window_size=4, step_interval=8, nodes=2)
    balanced = Player(OurCandidate(mode, shape, config, 2), PRICE)
    plain = Player(Unbalanced(ExpertShape(2, 16, 16, 4)), PRICE)
    for player in (balanced, plain):
        player.play(StepBlock(0, counts))
    first = balanced.measured.rebalances[0]
    assert (first.planned, first.committed) == (8, 8 + COMMIT_LATENCY)
    before, after = (
        np.concatenate(one.measured.imbalance)[20:].mean() for one in (plain, balanced)
    )
    assert after < before / 5


def steps_all_on_first_rank(candidate: Sharing, layer: int, steps: int) -> list[int]:
    """Expert 0 alone has rows, thousands in each step."""
    counts = np.zeros((steps, 4, 2), np.int32)
    counts[:, :, 0] = 4000
    found = []
    player = Player(candidate, PRICE)
    for step in range(steps):
        before = player.measured.rank_rows[layer, 1]
        player.play(StepBlock(step, counts[step : step + 1]))
        if player.measured.rank_rows[layer, 1] == before:
            found.append(step)
    return found


def test_shares_of_plan_serve_before_moved_layers_commit() -> None:
    timing = replace(cadence(4, 40, 4), latency=COMMIT_LATENCY)
    assert steps_all_on_first_rank(Sharing(timing), 0, 12) == list(range(4 + 3, 12))
    assert steps_all_on_first_rank(Sharing(timing), 3, 12) == list(range(4 + COMMIT_LATENCY, 12))
    quick = replace(timing, latency=1)
    assert steps_all_on_first_rank(Sharing(quick), 0, 12) == list(range(4 + 1, 12))


def test_shares_solved_between_plans_serve_from_the_step_after_the_next() -> None:
    updating = Sharing(cadence(2, 100, 100), updates=True, sub_windows=1)
    assert steps_all_on_first_rank(updating, 0, 8) == list(range(2 + 1, 8))


def test_no_plan_is_made_while_the_last_one_is_on_its_way() -> None:
    candidate = Swapping(cadence(2, 4, 4, layers=1))
    measured = played(candidate, 17)
    # The plan after 4 steps has committed all layers before step 8: that after 8 is made.
    assert [one.planned for one in measured.rebalances] == [4, 8, 12, 16]
    slow = Link(bytes_per_second=100.0, expert_bytes=10, step_seconds=0.1)
    measured = played(Swapping(cadence(2, 4, 4)), 17, slow)
    assert [(one.planned, one.committed) for one in measured.rebalances] == [(4, 13), (16, 25)]
