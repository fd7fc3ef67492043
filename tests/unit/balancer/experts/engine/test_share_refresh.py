from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest
import torch

from equipoise.balancer.experts.engine.serving_state import Installed
from equipoise.balancer.experts.engine.share_refresh import KeepShares, LaggedShares
from equipoise.balancer.experts.load_window import LoadWindow
from equipoise.balancer.experts.placement import (
    Layout,
    Load,
    Shape,
    contiguous,
    even_shares,
    solve_shares,
)
from equipoise.balancer.experts.routing.layer_update import Change, change_of
from equipoise.balancer.experts.runtime.jobs import ThreadWorker, finish
from equipoise.hal.errors import AgreementLost

SHAPE = Shape(layers=2, experts=4, slots=6, ranks=2)
SKEWED = np.array([[10, 300, 300, 10]] * 2, dtype=np.int64)


@dataclass
class FakeInstalled:
    layout: Layout
    renewals: list[Change] = field(default_factory=list)

    def commit(self, change: Change, copies: tuple[()]) -> None:
        assert copies == ()
        self.renewals.append(change)
        self.layout = change.on(self.layout)


@dataclass
class FakeLoad:
    latest: Load
    sums: deque[Load] = field(default_factory=lambda: deque(maxlen=1))


def start() -> Layout:
    placement = contiguous(SHAPE)
    return Layout(placement, even_shares(placement, SHAPE.experts))


@dataclass
class Bench:
    installed: FakeInstalled
    load: FakeLoad
    renewal: LaggedShares

    def boundary(self, summed: bool) -> None:
        finish(self.renewal.boundary(summed), 20.0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    installed, load = FakeInstalled(start()), FakeLoad(SKEWED)
    worker = ThreadWorker("solver", 20.0)
    renewal = LaggedShares(
        cast(Installed, installed), cast(LoadWindow, load), SHAPE, hysteresis=655, worker=worker
    )
    yield Bench(installed, load, renewal)
    worker.close()


def keeping(installed: FakeInstalled) -> KeepShares:
    return KeepShares(cast(Installed, installed), SHAPE)


def test_lagged_shares_are_installed_one_boundary_after_sum(bench: Bench) -> None:
    bench.boundary(summed=True)
    assert bench.renewal.pending
    assert bench.installed.renewals == []
    bench.boundary(summed=False)
    assert not bench.renewal.pending
    wanted = solve_shares(SKEWED, contiguous(SHAPE), SHAPE)
    np.testing.assert_array_equal(bench.installed.layout.shares, wanted)
    bench.boundary(summed=False)
    assert len(bench.installed.renewals) == 1


def test_lagged_shares_for_replaced_placement_are_dropped(bench: Bench) -> None:
    bench.boundary(summed=True)
    other = np.roll(contiguous(SHAPE), 1, axis=1)
    bench.installed.layout = Layout(other, even_shares(other, SHAPE.experts))
    bench.boundary(summed=False)
    assert bench.installed.renewals == []


def test_lagged_shares_are_installed_for_untouched_layers(bench: Bench) -> None:
    bench.boundary(summed=True)
    other = contiguous(SHAPE)
    other[0] = np.roll(other[0], 1)
    bench.installed.layout = Layout(other, even_shares(other, SHAPE.experts))
    bench.boundary(summed=False)
    (change,) = bench.installed.renewals
    assert change.layers == (1,)
    wanted = change_of(bench.installed.layout, SHAPE, [1]).update
    assert torch.equal(change.update.cumulative, wanted.cumulative)


def test_lagged_shares_with_small_gain_are_not_installed(bench: Bench) -> None:
    bench.installed.layout = Layout(
        contiguous(SHAPE), solve_shares(SKEWED, contiguous(SHAPE), SHAPE)
    )
    bench.boundary(summed=True)
    bench.boundary(summed=False)
    assert bench.installed.renewals == []


def test_lagged_shares_that_cannot_be_solved_stop_the_rank(bench: Bench) -> None:
    bench.load.latest = np.full_like(SKEWED, 2**46)
    bench.boundary(summed=True)
    with pytest.raises(AgreementLost, match="shares were not solved on this rank: counts"):
        bench.boundary(summed=False)


def test_lagged_shares_ignore_shares_of_a_plan(bench: Bench) -> None:
    bench.renewal.planned(start())
    assert bench.installed.renewals == []


def test_kept_shares_take_shares_of_plan_where_placement_stays() -> None:
    installed = FakeInstalled(start())
    keep = keeping(installed)
    finish(keep.boundary(summed=True), 20.0)
    wanted = Layout(contiguous(SHAPE), solve_shares(SKEWED, contiguous(SHAPE), SHAPE))
    keep.planned(wanted)
    (change,) = installed.renewals
    assert change.layers == (0, 1)
    np.testing.assert_array_equal(installed.layout.shares, wanted.shares)
    keep.planned(wanted)
    assert len(installed.renewals) == 1, "equal shares are not installed again"


def test_kept_shares_of_moving_layer_wait_for_its_weights() -> None:
    installed = FakeInstalled(start())
    moved = contiguous(SHAPE)
    moved[1] = np.roll(moved[1], 2)
    shares = solve_shares(SKEWED, moved, SHAPE)
    keeping(installed).planned(Layout(moved, shares))
    (change,) = installed.renewals
    assert change.layers == (0,)
