"""Plays the steps of a trace to one candidate: load, plans, commits, rows of ranks, time."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.placement import Layout, Load
from equipoise.report.placement.spread import Reals
from equipoise.report.replay.candidate import Candidate, ProposedLayout, incoming
from equipoise.report.replay.engine_model import Cadence, WindowLoad
from equipoise.report.replay.rank_rows import RankRowsRule
from equipoise.report.replay.step_price import SlotOdds, StepPrice, mean_of_layers, step_imbalance
from equipoise.report.replay.steps import StepBlock

NEVER = 1 << 62
AGREEMENT_LATENCY = 3
"""Steps from the end of a window to the first with the plan's shares: the vote on opening, the plan
and the vote on it each end at a step's boundary."""


@dataclass(frozen=True)
class Rebalance:
    """One plan and its move.

    Attributes:
        planned: steps that had been served when it was planned.
        committed: first step that all of its layers serve with their new placement.
        copies: that their rank did not hold.
        busiest: copies of the rank that receives most, over all layers.
        layers: that changed.
        pause: seconds that serving stood still for it; None where the link or an expert is unknown.
    """

    planned: int
    committed: int
    copies: int
    busiest: int
    layers: int
    pause: float | None


@dataclass(frozen=True)
class Link:
    """What weights move over.

    Attributes:
        bytes_per_second: into a rank.
        expert_bytes: of an expert in one layer.
        step_seconds: a step, which says how many bytes come in one; None where unknown.
    """

    bytes_per_second: float
    expert_bytes: int
    step_seconds: float | None

    def seconds(self, copies: int) -> float:
        """That a rank takes to receive so many copies."""
        return copies * self.expert_bytes / self.bytes_per_second


@dataclass
class Measurements:
    """What is measured of a candidate.

    Attributes:
        steps: numbers of the steps that were evaluated.
        imbalance: of each, max/mean - 1 of the ranks, mean over layers.
        seconds: time of each, as the price has it.
        layer_imbalance: sums over those steps, (layers,), and how many had rows.
        rank_rows: sums over those steps, (layers, ranks).
        rebalances: in order.
        served: steps in all.
    """

    layer_imbalance: Reals
    layer_steps: npt.NDArray[np.int64]
    rank_rows: Reals
    steps: list[npt.NDArray[np.int64]] = field(default_factory=list)
    imbalance: list[Reals] = field(default_factory=list)
    seconds: list[Reals] = field(default_factory=list)
    rebalances: list[Rebalance] = field(default_factory=list)
    served: int = 0


class Player:
    """Plays blocks of steps, one after the other.

    Between two events nothing changes: what is installed serves, load is counted. Events, all
    between two steps: a sub-window of load ends, a plan is made, layers commit.

    Args:
        candidate: what serves.
        price: of a step.
        every: one of so many steps is evaluated.
        link: of weights; None where unknown: they then arrive at once, or as the cadence has it.
    """

    def __init__(
        self, candidate: Candidate, price: StepPrice, every: int = 1, link: Link | None = None
    ) -> None:
        self.candidate = candidate
        self._price, self._every, self._link = price, every, link
        shape = candidate.shape
        self._layout = candidate.start()
        self._rule: RankRowsRule | None = None
        self._pending: deque[tuple[int, tuple[int, ...], Layout]] = deque()
        self._solved: tuple[int, Layout] | None = None
        self._history = _LoadHistory(candidate.cadence, candidate.sub_windows)
        self._shares = candidate.share_updates()
        self.measured = Measurements(
            np.zeros(shape.layers), np.zeros(shape.layers, np.int64),
            np.zeros((shape.layers, shape.ranks)),
        )  # fmt: skip

    def play(self, block: StepBlock) -> None:
        """Serves its steps. Raises `PlacementError` where a plan cannot be made."""
        place = 0
        while place < len(block):
            step = block.first + place
            last = min(len(block), place + self._next_event(step) - step)
            self._serve(block, place, last)
            place = last
            self._events(block.first + last)

    def _next_event(self, step: int) -> int:
        commit = self._pending[0][0] if self._pending else NEVER
        solved = self._solved[0] if self._solved else NEVER
        return min(commit, solved, self._history.next_boundary(step))

    def _serve(self, block: StepBlock, first: int, last: int) -> None:
        rule = self._installed_rule(block)
        load: Load = block.counts[first:last].sum(axis=0, dtype=np.int64)
        self._history.add(load, last - first)
        self.measured.served += last - first
        numbers = np.arange(block.first + first, block.first + last)
        evaluated = numbers[numbers % self._every == 0]
        if evaluated.size:
            places = evaluated - block.first
            placement, ranks = self._layout.placement, self.candidate.shape.ranks
            odds = SlotOdds(block.counts[places], placement, rule.slot_parts(), ranks)
            self._measure(rule.rank_rows(block, places), evaluated, odds)

    def _installed_rule(self, block: StepBlock) -> RankRowsRule:
        if self._rule is None:
            self._rule = self.candidate.rule(self._layout, bool(block.tokens))
        return self._rule

    def _slot_rows(self, load: Load, rule: RankRowsRule) -> Reals:
        of_slots: Load = np.take_along_axis(load, self._layout.placement.astype(np.int64), axis=1)
        expected: Reals = (of_slots * rule.slot_parts()).astype(np.float64)
        return expected

    def _measure(
        self, rows: npt.NDArray[np.float32], steps: npt.NDArray[np.int64], odds: SlotOdds
    ) -> None:
        uneven, found = step_imbalance(rows), self.measured
        known = ~np.isnan(uneven)
        found.layer_imbalance += np.where(known, uneven, 0.0).sum(axis=0)
        found.layer_steps += known.sum(axis=0)
        found.rank_rows += rows.sum(axis=0, dtype=np.float64)
        found.steps.append(steps)
        found.imbalance.append(mean_of_layers(uneven))
        found.seconds.append(self._price.steps(rows, odds))

    def _events(self, step: int) -> None:
        """What happens when so many steps have been served."""
        while self._pending and self._pending[0][0] <= step:
            _, layers, layout = self._pending.popleft()
            self._commit(layers, layout)
        if self._solved is not None and self._solved[0] <= step:
            self._install_shares(self._solved[1])
        if (latest := self._history.end_of_sub_window(step)) is not None:
            self._solve_shares(latest, step)
        if self._history.plan_is_due(step):
            self._plan(step)

    def _solve_shares(self, load: Load, step: int) -> None:
        """New shares serve from the step after the next boundary on."""
        if self._shares is None:
            return
        shares = self._shares.new_shares(load, self._layout)
        if shares is not None:
            self._solved = step + 1, Layout(self._layout.placement, shares)

    def _install_shares(self, solved: Layout) -> None:
        """Of layers that have the placement that they were solved for."""
        self._solved = None
        same = (solved.placement == self._layout.placement).all(axis=1)
        self._commit(tuple(np.flatnonzero(same).tolist()), solved)

    def _plan(self, step: int) -> None:
        windows = self._history.windows()
        if not windows.size or self._pending:
            return  # nothing was counted yet, or the last plan is still on its way
        load = windows.sum(axis=0)
        # Engines count rows of slots as they dispatch them: here it is what they expect.
        rule = self._rule or self.candidate.rule(self._layout, False)
        slots = np.rint(self._slot_rows(load, rule)).astype(np.int64)
        window = WindowLoad(load, slots, self._history.steps, windows)
        self._move(self.candidate.plan(window, self._layout), step)

    def _move(self, plan: ProposedLayout, step: int) -> None:
        old, new = self._layout.placement, plan.layout.placement
        copies = incoming(old, new, self.candidate.shape)
        cadence = self.candidate.cadence
        assert cadence is not None
        stays = np.setdiff1d(np.arange(len(old)), plan.order)
        # Layers that keep their placement get the plan's shares when the plan is agreed on.
        latency = 0 if cadence.blocking else min(cadence.latency, AGREEMENT_LATENCY)
        self._pending.append((step + latency, tuple(stays.tolist()), plan.layout))
        commits = _commit_steps(plan.order, copies, cadence, step, self._link)
        pause = None
        busiest = int(copies.sum(axis=0).max())
        if self._link is not None:
            pause = self._link.seconds(busiest) if cadence.blocking else 0.0
        self._pending.extend((at, layers, plan.layout) for at, layers in commits)
        last = commits[-1][0] if commits else step
        self.measured.rebalances.append(
            Rebalance(step, last, int(copies.sum()), busiest, len(plan.order), pause)
        )
        while self._pending and self._pending[0][0] <= step:
            _, layers, layout = self._pending.popleft()
            self._commit(layers, layout)

    def _commit(self, layers: tuple[int, ...], layout: Layout) -> None:
        if not layers:
            return
        placement, shares = self._layout.placement.copy(), self._layout.shares.copy()
        placement[list(layers)] = layout.placement[list(layers)]
        shares[list(layers)] = layout.shares[list(layers)]
        self._install(Layout(placement, shares))

    def _install(self, layout: Layout) -> None:
        self._layout, self._rule = layout, None


def _commit_steps(
    order: tuple[int, ...],
    copies: Load,
    cadence: Cadence,
    step: int,
    link: Link | None,
) -> list[tuple[int, tuple[int, ...]]]:
    """When layers commit: the number of the first step that they serve with their new placement.

    A pause lets all commit at once. Beside the forward pass a layer commits once its copies have
    come over the link, and no more layers commit in a step than the engine lets.
    """
    if cadence.blocking:
        return [(step, order)] if order else []
    commits: dict[int, list[int]] = {}
    received = 0
    for number, layer in enumerate(order):
        received += int(copies[layer].max())
        wait = 0 if cadence.layers_per_step is None else number // cadence.layers_per_step
        if link is not None and link.step_seconds is not None:
            wait = max(wait, int(link.seconds(received) / link.step_seconds))
        commits.setdefault(step + cadence.latency + wait, []).append(layer)
    return [(at, tuple(layers)) for at, layers in sorted(commits.items())]


class _LoadHistory:
    """Sums of load that plans are made from.

    Sub-windows end at the steps at which plans are made, and at whole multiples before.
    """

    def __init__(self, cadence: Cadence | None, sub_windows: int) -> None:
        self._cadence = cadence
        if cadence is None:
            return
        self._length = cadence.window // sub_windows
        self._next_plan = cadence.first
        self._sums: deque[Load] = deque(maxlen=sub_windows)
        self._lengths: deque[int] = deque(maxlen=sub_windows)
        self._current: Load | None = None
        self._counted = 0

    @property
    def steps(self) -> int:
        """Steps that the sums are of."""
        return sum(self._lengths)

    def next_boundary(self, step: int) -> int:
        """The next end of a sub-window."""
        if self._cadence is None:
            return NEVER
        left = self._next_plan - step
        return step + (left % self._length or self._length)

    def add(self, load: Load, steps: int) -> None:
        """Counts steps, none beyond the next boundary."""
        if self._cadence is None:
            return
        self._current = load if self._current is None else self._current + load
        self._counted += steps

    def end_of_sub_window(self, step: int) -> Load | None:
        """The sum that has just ended.

        A shorter piece, after a plan, is dropped; before the first plan it is all there is.
        """
        if self._cadence is None or (self._next_plan - step) % self._length:
            return None
        load, counted = self._current, self._counted
        self._current, self._counted = None, 0
        if load is None or (counted < self._length and step != self._next_plan):
            return None
        self._sums.append(load)
        self._lengths.append(counted)
        return load

    def plan_is_due(self, step: int) -> bool:
        """Whether a plan is made here."""
        if self._cadence is None or step != self._next_plan:
            return False
        self._next_plan += self._cadence.interval
        return True

    def windows(self) -> Load:
        """(windows, layers, experts), the latest; empty before the first one."""
        return np.array(list(self._sums), dtype=np.int64)
