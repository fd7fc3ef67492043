"""What is replayed side by side: no balancer, those of engines, and ours."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from equipoise.balancer.experts.config import BalancerConfig, ShareMode
from equipoise.balancer.experts.placement import (
    ExpertShape,
    Layout,
    Load,
    Placement,
    Shares,
    even_shares,
    initial_placement,
)
from equipoise.balancer.experts.planning.rebalance_plan import limits_of, plan_rebalance
from equipoise.balancer.experts.routing.drift import DriftDetector
from equipoise.report.replay.engine_model import (
    Cadence,
    DispatchRule,
    EngineModel,
    Planner,
    SplitKind,
    WindowLoad,
)
from equipoise.report.replay.rank_rows import (
    DrawnRows,
    LevelledRows,
    RankRowsRule,
    RoutedRows,
    SolvedRows,
    TurnRows,
    share_parts,
)

SEED = 0


@dataclass(frozen=True)
class ProposedLayout:
    """A plan.

    Attributes:
        layout: of all layers.
        order: layers that change, in the order in which they move.
    """

    layout: Layout
    order: tuple[int, ...]


class ShareUpdates(Protocol):
    """Solves shares anew between plans."""

    def new_shares(self, load: Load, layout: Layout) -> Shares | None:
        """From the load of a sub-window; None to keep those of the layout."""
        ...


class Candidate(Protocol):
    """One row of the table."""

    @property
    def name(self) -> str:
        """For people, unique among those that are replayed."""
        ...

    @property
    def engine(self) -> str:
        """Whose balancer it is; empty without one."""
        ...

    @property
    def shape(self) -> ExpertShape:
        """Numbers of layers, experts, slots and ranks."""
        ...

    @property
    def cadence(self) -> Cadence | None:
        """When it plans; None: never."""
        ...

    @property
    def sub_windows(self) -> int:
        """Into how many sums the window is divided."""
        ...

    @property
    def collective(self) -> bool:
        """Whether ranks exchange counts in every layer and step, which is not priced."""
        ...

    def start(self) -> Layout:
        """What is installed at first."""
        ...

    def plan(self, load: WindowLoad, installed: Layout) -> ProposedLayout:
        """The next layout."""
        ...

    def rule(self, layout: Layout, has_tokens: bool) -> RankRowsRule:
        """How rows come to ranks under a layout."""
        ...

    def share_updates(self) -> ShareUpdates | None:
        """New ones, to be told of every sub-window; None where shares only change with a plan."""
        ...


@dataclass(frozen=True)
class Unbalanced:
    """Experts in their order on consecutive ranks, nothing moves: what runs without a balancer."""

    shape: ExpertShape
    name: str = "no balancer"
    engine: str = ""
    cadence: None = None
    sub_windows: int = 1
    collective: bool = False

    def start(self) -> Layout:
        """In the order of experts."""
        return with_even_shares(initial_placement(self.shape), self.shape)

    def plan(self, load: WindowLoad, installed: Layout) -> ProposedLayout:
        """Nothing."""
        return ProposedLayout(installed, ())

    def rule(self, layout: Layout, has_tokens: bool) -> RankRowsRule:
        """Drawn where there are replicas."""
        return DrawnRows(layout, self.shape, share_parts(layout), SEED)

    def share_updates(self) -> None:
        """None."""


@dataclass(frozen=True)
class EngineCandidate:
    """An engine's balancer with one of its dispatch rules and policies.

    Attributes:
        model: of the engine.
        dispatch: one of its rules.
        shape: numbers of layers, experts, slots and ranks.
        cadence: its defaults, or as asked for.
        policy: name of one of its further policies; empty for its default.
    """

    model: EngineModel
    dispatch: DispatchRule
    shape: ExpertShape
    cadence: Cadence
    policy: str = ""
    sub_windows: int = 1

    @property
    def name(self) -> str:
        """Engine, policy and rule."""
        words = [self.model.name, self.policy]
        if len(self.model.rules) > 1:
            words.append(self.dispatch.name)
        return " ".join(filter(None, words))

    @property
    def engine(self) -> str:
        """Its name."""
        return self.model.name

    @property
    def collective(self) -> bool:
        """Where the rule solves each batch."""
        return self.dispatch.split is SplitKind.BY_BATCH

    def start(self) -> Layout:
        """As the engine starts."""
        return with_even_shares(self.model.initial(self.shape), self.shape)

    def plan(self, load: WindowLoad, installed: Layout) -> ProposedLayout:
        """By the engine's policy."""
        planner: Planner = self.model.policies[self.policy] if self.policy else self.model.planner
        placement = planner(load, installed.placement, self.shape)
        changed = np.flatnonzero((placement != installed.placement).any(axis=1))
        return ProposedLayout(with_even_shares(placement, self.shape), tuple(changed.tolist()))

    def rule(self, layout: Layout, has_tokens: bool) -> RankRowsRule:
        """The rule itself where there are tokens, and its odds where there are counts."""
        if has_tokens:
            return RoutedRows(self.dispatch, layout, self.shape)
        if self.dispatch.split is SplitKind.BY_BATCH:
            return SolvedRows(layout, self.shape, SEED)
        if self.dispatch.split is SplitKind.IN_TURN:
            return TurnRows(layout, self.shape)
        parts = self.dispatch.parts(layout.placement, self.shape)
        return DrawnRows(layout, self.shape, parts, SEED)

    def share_updates(self) -> None:
        """Engines divide evenly, or batch by batch."""


LAYERS_STAGED = 2
"""Default staging of our balancer: layers of which every slot changes."""


COMMIT_LATENCY = 5
"""Steps from the end of a window to the first step that serves with the plan made from it: the vote
on opening, the plan, the vote on it, the transfer and the commit each end at a step's boundary."""


@dataclass(frozen=True)
class OurCandidate:
    """Our balancer in a share mode.

    Attributes:
        mode: the share mode.
        shape: numbers of layers, experts, slots and ranks.
        config: of the balancer.
        nodes: of as many ranks each; in mode `node` those of one level together.
    """

    mode: ShareMode
    shape: ExpertShape
    config: BalancerConfig
    nodes: int = 1
    engine: str = field(default="equipoise", init=False)

    @property
    def name(self) -> str:
        """Share mode, and where there is none, that there is no redundant slot."""
        if self.shape.slots == self.shape.experts:
            return "equipoise, no redundant slot"
        return f"equipoise {self.mode}"

    @property
    def cadence(self) -> Cadence:
        """That of the configuration: layers commit as staging has room, beside the forward pass."""
        return Cadence(
            window=self.config.window_size,
            interval=self.config.step_interval,
            first=self.config.step_interval,
            layers_per_step=None,
            blocking=False,
            source="equipoise.balancer BalancerConfig",
            latency=COMMIT_LATENCY,
        )

    @property
    def sub_windows(self) -> int:
        """Into how many sums the window is divided."""
        return self.config.window_size // self.config.sub_window

    @property
    def collective(self) -> bool:
        """Where ranks level their batches together."""
        return self.mode in (ShareMode.NODE, ShareMode.EXACT)

    def start(self) -> Layout:
        """In the order of experts, further replicas beside."""
        return with_even_shares(initial_placement(self.shape), self.shape)

    def plan(self, load: WindowLoad, installed: Layout) -> ProposedLayout:
        """By the engine's own code."""
        staging = LAYERS_STAGED * self.shape.slots_per_rank
        plan = plan_rebalance(load.windows, installed, self.shape, limits_of(self.config, staging))
        changed, shares = list(plan.changed_layers), plan.layout.shares
        if self.mode is ShareMode.LAGGED:
            # Of layers that stay, those that were solved since are newer than the plan's.
            shares = installed.shares.copy()
            shares[changed] = plan.layout.shares[changed]
        return ProposedLayout(Layout(plan.layout.placement, shares), plan.changed_layers)

    def rule(self, layout: Layout, has_tokens: bool) -> RankRowsRule:
        """Levelled from counts, or drawn by shares."""
        if not self.config.levels_batches:
            return DrawnRows(layout, self.shape, share_parts(layout), SEED)
        groups = {ShareMode.LOCAL: None, ShareMode.NODE: self.nodes, ShareMode.EXACT: 1}
        return LevelledRows(layout, self.shape, groups[self.mode])

    def share_updates(self) -> ShareUpdates | None:
        """In mode `lagged`."""
        if self.mode is not ShareMode.LAGGED:
            return None
        return DriftDetector(self.shape, self.config.min_gain_parts, planned=self.sub_windows)


def with_even_shares(placement: Placement, shape: ExpertShape) -> Layout:
    """A layout whose replicas take even parts."""
    placement = np.ascontiguousarray(placement)
    return Layout(placement, even_shares(placement, shape.experts))


def incoming(old: Placement, new: Placement, shape: ExpertShape) -> Load:
    """Copies that ranks receive, (layers, ranks): experts in slots that they had in none."""
    layers, ranks = shape.layers, shape.ranks
    rows = np.arange(layers)[:, None], np.arange(shape.slots)[None] // shape.slots_per_rank
    had, has = (np.zeros((layers, ranks, shape.experts), bool) for _ in range(2))
    had[*rows, old] = True
    has[*rows, new] = True
    copies: Load = (has & ~had).sum(axis=2)
    return copies
