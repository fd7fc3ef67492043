"""Swaps that leave shares room: what they change of a plan, and what they must not."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balancer.experts import plan
from equipoise.balancer.experts.config import BalancerConfig, PlannerOptions, ShareMode
from equipoise.balancer.experts.planning.rebalance_plan import limits_of
from equipoise.hal.errors import ConfigError, PlacementError

Counts = npt.NDArray[np.int64]
Placement = npt.NDArray[np.int32]
LAYERS, EXPERTS, SLOTS, RANKS = 3, 32, 40, 8
TARGET = 0.02


def loads(seed: int, drift: float) -> tuple[Counts, Counts]:
    """(layers, experts) of the plan that is installed, and of the next one."""
    draws = np.random.default_rng(seed)
    first = draws.lognormal(sigma=1.0, size=(LAYERS, EXPERTS)) * 1000
    second = first * draws.lognormal(sigma=drift, size=first.shape)
    return first.astype(np.int64), second.astype(np.int64)


def even_ranks(load: Counts, placement: Placement) -> npt.NDArray[np.float64]:
    """(layers, ranks): load with an even split."""
    copies = np.stack([np.bincount(row, minlength=EXPERTS) for row in placement])
    parts = np.take_along_axis(load / copies, placement.astype(np.int64), axis=1)
    ranks: npt.NDArray[np.float64] = parts.reshape(LAYERS, RANKS, -1).sum(axis=2)
    return ranks


@settings(deadline=None)
@given(st.integers(0, 999), st.sampled_from([0.0, 0.1, 0.5]), st.sampled_from([1, 4, 12]))
def test_headroom_levels_the_even_split_and_keeps_what_was_planned(
    seed: int, drift: float, headroom: int
) -> None:
    before, load = loads(seed, drift)
    common: dict[str, Any] = {"slots": SLOTS, "ranks": RANKS, "target": TARGET}
    installed = plan(before, policy="connected", **common).placement
    without = plan(load, installed=installed, **common)
    made = plan(load, installed=installed, headroom=headroom, **common)
    changed = without.layer_moves > 0
    assert (made.layer_moves[~changed] == 0).all()
    assert (made.layer_moves <= without.layer_moves + 2 * headroom).all()
    assert (np.sort(made.placement) == np.sort(without.placement)).all()
    squares = [(even_ranks(load, one.placement) ** 2).sum(axis=1) for one in (made, without)]
    assert (squares[0] <= squares[1] * (1 + 1e-9)).all()
    worst = np.maximum(without.layer_imbalance, TARGET) + 1e-3
    assert (made.layer_imbalance <= worst).all()


@settings(deadline=None)
@given(st.integers(0, 999), st.integers(0, 12))
def test_headroom_moves_nothing_when_the_same_load_is_planned_again(
    seed: int, headroom: int
) -> None:
    before, load = loads(seed, 0.5)
    common: dict[str, Any] = {
        "slots": SLOTS,
        "ranks": RANKS,
        "target": TARGET,
        "headroom": headroom,
    }
    installed = plan(before, slots=SLOTS, ranks=RANKS, policy="connected").placement
    made = plan(load, installed=installed, **common)
    again = plan(load, installed=made.placement, **common)
    assert (again.layer_moves[made.layer_imbalance <= TARGET] == 0).all()


@settings(deadline=None)
@given(st.integers(0, 999), st.integers(0, 30), st.integers(1, 3))
def test_headroom_keeps_to_the_bounds_of_copies(seed: int, copies: int, per_rank: int) -> None:
    before, load = loads(seed, 0.5)
    installed = plan(before, slots=SLOTS, ranks=RANKS, policy="connected").placement
    common: dict[str, Any] = {"slots": SLOTS, "ranks": RANKS, "installed": installed, "headroom": 8}
    assert plan(load, max_copies=copies, **common).moves <= copies
    made = plan(load, max_copies_per_rank=per_rank, **common)
    differs = (made.placement != installed).reshape(LAYERS, RANKS, -1)
    assert differs.sum(axis=2).max() <= per_rank


@settings(deadline=None)
@given(st.integers(0, 999), st.integers(0, 40))
def test_headroom_takes_no_copy_from_the_target(seed: int, copies: int) -> None:
    before, load = loads(seed, 0.5)
    installed = plan(before, slots=SLOTS, ranks=RANKS, policy="connected").placement
    common: dict[str, Any] = {"slots": SLOTS, "ranks": RANKS, "installed": installed}
    with_it, without = (plan(load, max_copies=copies, headroom=swaps, **common) for swaps in (8, 0))
    assert with_it.predicted_imbalance <= max(without.predicted_imbalance, TARGET) + 1e-3


def test_headroom_halves_the_even_imbalance_of_a_layer_of_deepseek_v3() -> None:
    draws = np.random.default_rng(0)
    before = (draws.lognormal(sigma=1.0, size=(1, 256)) * 1000).astype(np.int64)
    load = (before * draws.lognormal(sigma=0.5, size=before.shape)).astype(np.int64)
    common: dict[str, Any] = {"slots": 288, "ranks": 32}
    installed = plan(before, policy="connected", **common).placement
    uneven = []
    for headroom in (0, 8):
        (row,) = plan(load, installed=installed, headroom=headroom, **common).placement
        parts = load[0][row] / np.bincount(row, minlength=256)[row]
        ranks = parts.reshape(32, -1).sum(axis=1)
        uneven.append(ranks.max() / ranks.mean() - 1)
    assert uneven[1] < 0.5 * uneven[0]


@pytest.mark.parametrize("headroom", [-1, 1001, 2.5, True])
def test_headroom_out_of_range_is_refused(headroom: int) -> None:
    load, _ = loads(0, 0.0)
    with pytest.raises(PlacementError, match="headroom must be"):
        plan(load, slots=SLOTS, ranks=RANKS, headroom=headroom)
    with pytest.raises(ConfigError, match="headroom"):
        PlannerOptions(headroom=headroom)


@pytest.mark.parametrize(
    ("shares", "headroom"),
    [
        (ShareMode.STATIC, 0),
        (ShareMode.LAGGED, 0),
        (ShareMode.LOCAL, 5),
        (ShareMode.NODE, 5),
        (ShareMode.EXACT, 5),
    ],
)
def test_balancer_plans_headroom_where_shares_level_batches(
    shares: ShareMode, headroom: int
) -> None:
    config = BalancerConfig(shares=shares, planner=PlannerOptions(headroom=5))
    assert limits_of(config, 1).headroom == headroom
