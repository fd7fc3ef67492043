import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.choices import Split
from equipoise.balancer.experts.config import Aims
from equipoise.balancer.experts.layout import Layout, even_shares, imbalance, solve_shares
from equipoise.balancer.experts.placement import SHARE_ONE, Load, Shape, check, contiguous
from equipoise.balancer.experts.planner import Freight, Limits, Shipped, by_ship, draft


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, Load]:
    ranks = draw(st.integers(1, 5))
    per_rank = draw(st.integers(1, 5))
    slots = ranks * per_rank
    shape = Shape(draw(st.integers(1, 3)), draw(st.integers(1, slots)), slots, ranks)
    counts = st.lists(st.integers(0, 5000), min_size=shape.experts, max_size=shape.experts)
    load = [draw(counts) for _ in range(shape.layers)]
    return shape, np.array(load, dtype=np.int64)


def start(shape: Shape) -> Layout:
    placement = contiguous(shape)
    return Layout(placement, even_shares(placement, shape.experts))


@given(cases())
def test_shares_of_an_expert_make_a_whole(case: tuple[Shape, Load]) -> None:
    shape, load = case
    placement = contiguous(shape)
    for shares in (even_shares(placement, shape.experts), solve_shares(load, placement, shape)):
        for row, held in zip(shares, placement, strict=True):
            sums = np.bincount(held, weights=row, minlength=shape.experts)
            assert (sums == SHARE_ONE).all()


def limits(hysteresis: int, staging: int) -> Limits:
    return Limits(hysteresis=hysteresis, staging=staging, aims=Aims(), nodes=1, split=Split.LEVEL)


def propose(load: Load, installed: Layout, shape: Shape, limits: Limits) -> Shipped:
    freight = Freight(parcel=4, nodes=1, staging=limits.staging, rank=0)
    return by_ship(draft(load[None], installed, shape, limits), installed, shape, freight)


@given(cases())
def test_a_proposal_is_complete_and_never_worse_than_what_is_installed(
    case: tuple[Shape, Load],
) -> None:
    shape, load = case
    installed = start(shape)
    proposal = propose(load, installed, shape, limits(hysteresis=0, staging=10_000))
    check(proposal.layout.placement, shape)
    assert (proposal.draft.predicted <= imbalance(load, installed, shape)).all()


@given(cases())
def test_the_same_load_gives_the_same_digest(case: tuple[Shape, Load]) -> None:
    shape, load = case
    first = propose(load, start(shape), shape, limits(hysteresis=10, staging=10_000))
    second = propose(load.copy(), start(shape), shape, limits(hysteresis=10, staging=10_000))
    assert first.layout.digest == second.layout.digest
    assert first.digest == second.digest


@given(cases())
def test_nothing_moves_when_nothing_is_to_be_gained(case: tuple[Shape, Load]) -> None:
    shape, load = case
    first = propose(load, start(shape), shape, limits(hysteresis=0, staging=10_000))
    again = propose(load, first.layout, shape, limits(hysteresis=0, staging=10_000))
    assert again.draft.order == ()
    assert again.shipment.total == again.shipment.lots == 0


@given(cases(), st.integers(0, 12))
def test_no_layer_is_moved_that_a_rank_could_not_stage_whole(
    case: tuple[Shape, Load], staging: int
) -> None:
    shape, load = case
    found = propose(load, start(shape), shape, limits(hysteresis=0, staging=staging))
    differs = start(shape).placement != found.layout.placement
    needs = differs.reshape(shape.layers, shape.ranks, -1).sum(axis=2)
    assert needs.max(initial=0) <= staging
    assert sorted(found.draft.order) == np.flatnonzero(differs.any(axis=1)).tolist()


def test_layers_that_gain_most_travel_first() -> None:
    shape = Shape(2, 4, 4, 2)
    load = np.array([[12, 10, 8, 8], [30, 30, 1, 1]], dtype=np.int64)
    proposal = propose(load, start(shape), shape, limits(hysteresis=0, staging=2))
    assert proposal.draft.order == (1, 0)


def test_hysteresis_keeps_a_layer_that_gains_too_little() -> None:
    shape = Shape(1, 4, 4, 2)
    load = np.array([[11, 11, 10, 10]], dtype=np.int64)
    gain = imbalance(load, start(shape), shape)[0]
    assert propose(load, start(shape), shape, limits(hysteresis=0, staging=9)).draft.order == (0,)
    assert (
        propose(load, start(shape), shape, limits(hysteresis=int(gain), staging=9)).draft.order
        == ()
    )


def test_imbalance_is_max_over_mean_minus_one() -> None:
    shape = Shape(1, 4, 4, 2)
    load = np.array([[30, 30, 20, 20]], dtype=np.int64)
    assert imbalance(load, start(shape), shape)[0] / SHARE_ONE == pytest.approx(0.2, abs=1e-4)


def test_no_load_at_all_is_balanced() -> None:
    shape = Shape(1, 4, 4, 2)
    assert imbalance(np.zeros((1, 4), dtype=np.int64), start(shape), shape).tolist() == [0]
