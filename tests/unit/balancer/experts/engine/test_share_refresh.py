from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest
import torch
from helpers.eager_worker import EagerWorker

from equipoise.balancer.experts.engine.serving_state import ServingState
from equipoise.balancer.experts.engine.share_refresh import LaggedShares, StaticShares
from equipoise.balancer.experts.load_window import LoadWindow
from equipoise.balancer.experts.placement import (
    ExpertShape,
    Layout,
    Load,
    even_shares,
    initial_placement,
    solve_shares,
)
from equipoise.balancer.experts.routing.layer_update import LayerUpdate, layer_update
from equipoise.balancer.experts.runtime.events import Track
from equipoise.balancer.experts.runtime.jobs import run_blocking
from equipoise.hal.errors import VoteOutcomeUnknown

SHAPE = ExpertShape(layers=2, experts=4, slots=6, ranks=2)
SKEWED = np.array([[10, 300, 300, 10]] * 2, dtype=np.int64)


@dataclass
class FakeInstalled:
    layout: Layout
    renewals: list[LayerUpdate] = field(default_factory=list)

    def commit(self, change: LayerUpdate, copies: tuple[()]) -> None:
        assert copies == ()
        self.renewals.append(change)
        self.layout = change.applied_to(self.layout)


@dataclass
class FakeLoad:
    latest: Load
    sums: deque[Load] = field(default_factory=lambda: deque(maxlen=1))


def start() -> Layout:
    placement = initial_placement(SHAPE)
    return Layout(placement, even_shares(placement, SHAPE.experts))


@dataclass
class Bench:
    serving: FakeInstalled
    load: FakeLoad
    renewal: LaggedShares

    def boundary(self, summed: bool) -> None:
        run_blocking(self.renewal.before_step(summed), 20.0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    serving, load = FakeInstalled(start()), FakeLoad(SKEWED)
    worker = EagerWorker(Track.SHARES, 20.0)
    renewal = LaggedShares(
        cast(ServingState, serving),
        cast(LoadWindow, load),
        SHAPE,
        drift_threshold=655,
        worker=worker,
    )
    yield Bench(serving, load, renewal)
    worker.close()


def static_shares(serving: FakeInstalled) -> StaticShares:
    return StaticShares(cast(ServingState, serving), SHAPE)


def test_lagged_shares_are_installed_one_boundary_after_sum(bench: Bench) -> None:
    bench.boundary(summed=True)
    assert bench.renewal.pending
    assert bench.serving.renewals == []
    bench.boundary(summed=False)
    assert not bench.renewal.pending
    expected = solve_shares(SKEWED, initial_placement(SHAPE), SHAPE)
    np.testing.assert_array_equal(bench.serving.layout.shares, expected)
    bench.boundary(summed=False)
    assert len(bench.serving.renewals) == 1


def test_lagged_shares_for_replaced_placement_are_dropped(bench: Bench) -> None:
    bench.boundary(summed=True)
    other = np.roll(initial_placement(SHAPE), 1, axis=1)
    bench.serving.layout = Layout(other, even_shares(other, SHAPE.experts))
    bench.boundary(summed=False)
    assert bench.serving.renewals == []


def test_lagged_shares_are_installed_for_untouched_layers(bench: Bench) -> None:
    bench.boundary(summed=True)
    other = initial_placement(SHAPE)
    other[0] = np.roll(other[0], 1)
    bench.serving.layout = Layout(other, even_shares(other, SHAPE.experts))
    bench.boundary(summed=False)
    (change,) = bench.serving.renewals
    assert change.layers == (1,)
    expected = layer_update(bench.serving.layout, SHAPE, [1]).tables
    assert torch.equal(change.tables.cumulative, expected.cumulative)


def test_lagged_shares_with_small_gain_are_not_installed(bench: Bench) -> None:
    bench.serving.layout = Layout(
        initial_placement(SHAPE), solve_shares(SKEWED, initial_placement(SHAPE), SHAPE)
    )
    bench.boundary(summed=True)
    bench.boundary(summed=False)
    assert bench.serving.renewals == []


def test_lagged_shares_that_cannot_be_solved_stop_the_rank(bench: Bench) -> None:
    bench.load.latest = np.full_like(SKEWED, 2**46)
    bench.boundary(summed=True)
    with pytest.raises(VoteOutcomeUnknown, match="shares were not solved on this rank: counts"):
        bench.boundary(summed=False)


def test_lagged_shares_ignore_shares_of_a_plan(bench: Bench) -> None:
    bench.renewal.apply_plan_shares(start())
    assert bench.serving.renewals == []


def test_kept_shares_take_shares_of_plan_where_placement_stays() -> None:
    serving = FakeInstalled(start())
    keep = static_shares(serving)
    run_blocking(keep.before_step(summed=True), 20.0)
    plan_layout = Layout(
        initial_placement(SHAPE), solve_shares(SKEWED, initial_placement(SHAPE), SHAPE)
    )
    keep.apply_plan_shares(plan_layout)
    (change,) = serving.renewals
    assert change.layers == (0, 1)
    np.testing.assert_array_equal(serving.layout.shares, plan_layout.shares)
    keep.apply_plan_shares(plan_layout)
    assert len(serving.renewals) == 1, "equal shares are not installed again"


def test_kept_shares_of_moving_layer_wait_for_its_weights() -> None:
    serving = FakeInstalled(start())
    new_placement = initial_placement(SHAPE)
    new_placement[1] = np.roll(new_placement[1], 2)
    shares = solve_shares(SKEWED, new_placement, SHAPE)
    static_shares(serving).apply_plan_shares(Layout(new_placement, shares))
    (change,) = serving.renewals
    assert change.layers == (0,)
