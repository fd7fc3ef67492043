"""Traffic whose topic switches between load stages, and plans for it: the same for every variant.

Everything here is a function of the point and the seed, so that every rank of every run has the
same, and nothing need be told.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
from emulation import (
    ANEW,
    EPOCHS,
    EXPERTS,
    FOLLOWING,
    INTERVAL,
    LAYERS,
    RANKS,
    ROWS,
    SEED,
    SLOTS,
    WINDOW,
    Point,
)
from loads import Model, windows

from equipoise.balancer.experts import plan
from equipoise.balancer.experts.layout import Layout, even_shares
from equipoise.balancer.experts.placement import Load, Shape, contiguous

SHAPE = Shape(LAYERS, EXPERTS, SLOTS, RANKS)
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Traffic:
    """Expert ids of every rank, step and layer.

    Attributes:
        skew: sigma of the logarithm of an expert's popularity.
        stages: how many.
        interval: steps between two plans.
    """

    skew: float
    stages: int
    interval: int = INTERVAL

    @property
    def switches(self) -> tuple[int, ...]:
        """Steps at which a stage begins."""
        return tuple(self.warm + EPOCHS * self.interval * stage for stage in range(self.stages))

    @property
    def warm(self) -> int:
        """Steps before the first stage: its first plan is made from its first steps."""
        return self.interval - WINDOW

    @property
    def steps(self) -> int:
        """All of them; no further plan is due."""
        return self.interval + EPOCHS * self.interval * self.stages

    def stage(self, step: int) -> int:
        """Which stage a step is of; -1 before the first."""
        return min((step - self.warm) // (EPOCHS * self.interval), self.stages - 1)

    def ids(self, step: int, rank: int) -> Ids:
        """int32 (layers, rows) of a rank's tokens."""
        stage = self.stage(step)
        odds = self._odds[stage]  # -1 is the last: a topic of the warm-up's own
        draw = np.random.default_rng((SEED, step, rank)).random((LAYERS, ROWS[max(stage, 0)]))
        found = [np.searchsorted(edges, row) for edges, row in zip(odds, draw, strict=True)]
        return np.minimum(np.stack(found), EXPERTS - 1).astype(np.int32)

    def load(self, steps: range) -> Load:
        """(layers, experts): rows over these steps and all ranks."""
        total = np.zeros((LAYERS, EXPERTS), dtype=np.int64)
        for step in steps:
            for rank in range(RANKS):
                for layer, row in enumerate(self.ids(step, rank)):
                    total[layer] += np.bincount(row, minlength=EXPERTS)
        return total

    @cached_property
    def _odds(self) -> list[npt.NDArray[np.float64]]:
        """Cumulative popularity by stage, (layers, experts); the last is the warm-up's."""
        model = Model(
            layers=LAYERS, experts=EXPERTS, ranks=RANKS, sigma=self.skew, domains=self.stages + 1,
            period=1, sub_windows=1,
        )  # fmt: skip
        return [window.odds.cumsum(axis=1) for window in windows(model, SEED, self.stages + 1)]


def digest(ids: Sequence[Ids]) -> str:
    """Of all that a rank serves, by step."""
    state = blake2b(digest_size=8)
    for step in ids:
        state.update(step.data)
    return state.hexdigest()


def traffic_of(point: Point) -> Traffic:
    """What a point is measured on."""
    return Traffic(point.skew, point.stages)


@dataclass(frozen=True)
class Given:
    """A plan that every system executes.

    Attributes:
        due: the boundary at which its load is known.
        stage: the load stage that it is for.
        anew: whether the topic is that of the plan before: weights move between placements that are
            both balanced.
        layout: to be installed.
        moves: copies that their rank did not hold.
    """

    due: int
    stage: int
    anew: bool
    layout: Layout
    moves: int


def start() -> Layout:
    """Installed at first."""
    placement = contiguous(SHAPE)
    return Layout(placement, even_shares(placement, EXPERTS))


Planner = Callable[[Load, Layout, bool], tuple[Layout, int]]
"""From load, what is installed, and whether to plan anew, to a layout and its moves."""


def given(traffic: Traffic, planner: Planner) -> Iterator[Given]:
    """All plans, each from where the one before leads."""
    layout = start()
    for number in range(EPOCHS * traffic.stages):
        closed = (number + 1) * traffic.interval
        load = traffic.load(range(closed - WINDOW, closed))
        stage, anew = number // EPOCHS, number % EPOCHS > 0
        layout, moves = planner(load, layout, anew)
        yield Given(closed + 1, stage, anew, layout, moves)


def common(load: Load, layout: Layout, anew: bool) -> tuple[Layout, int]:
    """What all systems execute: what the engine plans by default behind a switch of topic.

    Of a topic that stays plans are made anew, so that weights really move.
    """
    found = plan(
        load,
        slots=SLOTS,
        ranks=RANKS,
        installed=layout.placement,
        policy="connected" if anew else "incremental",
        max_copies=ANEW if anew else FOLLOWING,
    )
    return Layout(found.placement, found.shares), found.moves


def as_today(load: Load, layout: Layout, anew: bool) -> tuple[Layout, int]:
    """What other systems plan: greedily, anew every time, for an even split."""
    found = plan(load, slots=SLOTS, ranks=RANKS, installed=layout.placement, policy="greedy")
    return Layout(found.placement, even_shares(found.placement, EXPERTS)), found.moves
