from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest

from equipoise.balancer.experts.installed import Installed
from equipoise.balancer.experts.load import LoadWindow
from equipoise.balancer.experts.placement import Load, Shape, Shares, contiguous
from equipoise.balancer.experts.planner import Layout, even_shares, propose, solve_shares
from equipoise.balancer.experts.renewal import KeepShares, LaggedShares

SHAPE = Shape(layers=2, experts=4, slots=6, ranks=2)
SKEWED = np.array([[10, 300, 300, 10]] * 2, dtype=np.int64)
EVEN = np.array([[100, 100, 100, 100]] * 2, dtype=np.int64)


@dataclass
class FakeInstalled:
    layout: Layout
    renewals: list[Shares] = field(default_factory=list)

    def renew_shares(self, shares: Shares) -> None:
        self.renewals.append(shares)
        self.layout = Layout(self.layout.placement, shares)


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


@pytest.fixture
def bench() -> Iterator[Bench]:
    installed, load = FakeInstalled(start()), FakeLoad(SKEWED)
    renewal = LaggedShares(
        cast(Installed, installed), cast(LoadWindow, load), SHAPE, hysteresis=655, deadline=20.0
    )
    yield Bench(installed, load, renewal)
    renewal.close()


def test_a_solution_is_installed_one_boundary_after_its_sum(bench: Bench) -> None:
    bench.renewal.boundary(summed=True)
    assert bench.installed.renewals == []
    bench.renewal.boundary(summed=False)
    (shares,) = bench.installed.renewals
    np.testing.assert_array_equal(shares, solve_shares(SKEWED, contiguous(SHAPE), SHAPE))
    bench.renewal.boundary(summed=False)
    assert len(bench.installed.renewals) == 1


def test_a_solution_for_a_placement_that_is_gone_is_dropped(bench: Bench) -> None:
    bench.renewal.boundary(summed=True)
    bench.installed.layout = start()
    bench.renewal.boundary(summed=False)
    assert bench.installed.renewals == []


def test_shares_that_gain_too_little_stay(bench: Bench) -> None:
    bench.installed.layout = Layout(
        contiguous(SHAPE), solve_shares(SKEWED, contiguous(SHAPE), SHAPE)
    )
    bench.renewal.boundary(summed=True)
    bench.renewal.boundary(summed=False)
    assert bench.installed.renewals == []


def test_an_epoch_keeps_the_fresher_shares_of_layers_that_stay(bench: Bench) -> None:
    load = np.stack([EVEN[0] * 0 + [1, 1, 1, 500], EVEN[1]])
    proposal = propose(load, bench.installed.layout, SHAPE, hysteresis=0, staging=100)
    assert 0 in proposal.changed
    assert 1 not in proposal.changed
    fresher = solve_shares(SKEWED, contiguous(SHAPE), SHAPE)
    bench.installed.layout = Layout(contiguous(SHAPE), fresher)
    adopted = bench.renewal.adopt(proposal)
    np.testing.assert_array_equal(adopted.placement, proposal.layout.placement)
    np.testing.assert_array_equal(adopted.shares[0], proposal.layout.shares[0])
    np.testing.assert_array_equal(adopted.shares[1], fresher[1])


def test_static_and_exact_install_what_was_proposed() -> None:
    proposal = propose(SKEWED, start(), SHAPE, hysteresis=0, staging=100)
    keep = KeepShares()
    keep.boundary(summed=True)
    assert keep.adopt(proposal) is proposal.layout
