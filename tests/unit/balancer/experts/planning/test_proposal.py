from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from equipoise.balancer.experts.config import PlannerOptions, Split
from equipoise.balancer.experts.placement import (
    SHARE_ONE,
    ExpertShape,
    Layout,
    Load,
    check_placement,
    even_shares,
    imbalance,
    initial_placement,
)
from equipoise.balancer.experts.planning.proposal import (
    StagedProposal,
    TransferLimits,
    staged_proposal,
)
from equipoise.balancer.experts.planning.rebalance_plan import RebalanceLimits, plan_rebalance


@st.composite
def cases(draw: st.DrawFn) -> tuple[ExpertShape, Load]:
    ranks = draw(st.integers(1, 5))
    per_rank = draw(st.integers(1, 5))
    slots = ranks * per_rank
    shape = ExpertShape(draw(st.integers(1, 3)), draw(st.integers(1, slots)), slots, ranks)
    counts = st.lists(st.integers(0, 5000), min_size=shape.experts, max_size=shape.experts)
    load = [draw(counts) for _ in range(shape.layers)]
    return shape, np.array(load, dtype=np.int64)


def start(shape: ExpertShape) -> Layout:
    placement = initial_placement(shape)
    return Layout(placement, even_shares(placement, shape.experts))


def limits(min_gain: int, staging: int) -> RebalanceLimits:
    return RebalanceLimits(
        min_gain=min_gain,
        staging=staging,
        planner=PlannerOptions(),
        nodes=1,
        split=Split.BY_SHARES,
    )


def propose(
    load: Load, installed: Layout, shape: ExpertShape, limits: RebalanceLimits
) -> StagedProposal:
    transfer_limits = TransferLimits(slots_per_message=4, nodes=1, staging=limits.staging, rank=0)
    return staged_proposal(
        plan_rebalance(load[None], installed, shape, limits), installed, shape, transfer_limits
    )


@given(cases())
def test_proposal_is_complete_and_never_worse_than_installed(
    case: tuple[ExpertShape, Load],
) -> None:
    shape, load = case
    installed = start(shape)
    proposal = propose(load, installed, shape, limits(min_gain=0, staging=10_000))
    check_placement(proposal.layout.placement, shape)
    assert (proposal.plan.predicted_imbalance <= imbalance(load, installed, shape)).all()


@given(cases())
def test_proposal_digest_is_equal_for_equal_load(case: tuple[ExpertShape, Load]) -> None:
    shape, load = case
    first = propose(load, start(shape), shape, limits(min_gain=10, staging=10_000))
    second = propose(load.copy(), start(shape), shape, limits(min_gain=10, staging=10_000))
    assert first.layout.digest == second.layout.digest
    assert first.digest == second.digest


@given(cases())
def test_proposal_is_empty_when_nothing_can_be_gained(case: tuple[ExpertShape, Load]) -> None:
    shape, load = case
    first = propose(load, start(shape), shape, limits(min_gain=0, staging=10_000))
    again = propose(load, first.layout, shape, limits(min_gain=0, staging=10_000))
    assert again.plan.changed_layers == ()
    assert again.migration.total_copies == again.migration.chunks == 0


@pytest.mark.slow
@given(cases(), st.integers(0, 12))
def test_proposal_fills_no_more_slots_of_rank_than_staging(
    case: tuple[ExpertShape, Load], staging: int
) -> None:
    shape, load = case
    proposal = propose(load, start(shape), shape, limits(min_gain=0, staging=staging))
    changed_slots = start(shape).placement != proposal.layout.placement
    needs = changed_slots.reshape(shape.layers, shape.ranks, -1).sum(axis=2)
    assert needs.max(initial=0) <= staging
    assert (
        sorted(proposal.plan.changed_layers) == np.flatnonzero(changed_slots.any(axis=1)).tolist()
    )


@given(cases(), st.integers(0, 5))
@example((ExpertShape(1, 9, 10, 2), np.array([[0, 0, 3, 3, 0, 0, 0, 0, 4]])), 1)
def test_proposal_names_layers_that_more_staging_would_bring_lower(
    case: tuple[ExpertShape, Load], staging: int
) -> None:
    shape, load = case
    tight_limits = limits(min_gain=300, staging=staging)
    limited_plan = propose(load, start(shape), shape, tight_limits).plan
    ample_limits = replace(tight_limits, staging=shape.slots_per_rank)
    unlimited_plan = propose(load, start(shape), shape, ample_limits).plan
    assert unlimited_plan.short_of_staging == ()
    is_lowered = (
        limited_plan.predicted_imbalance - unlimited_plan.predicted_imbalance
        > tight_limits.min_gain
    )
    is_above_target = limited_plan.predicted_imbalance > tight_limits.planner.target * SHARE_ONE
    assert set(np.flatnonzero(is_lowered & is_above_target).tolist()) <= set(
        limited_plan.short_of_staging
    )
    assert set(limited_plan.short_of_staging) <= set(np.flatnonzero(is_above_target).tolist())
    if staging >= shape.slots_per_rank:
        assert limited_plan.short_of_staging == ()


def test_proposal_replans_layers_without_required_redundancy_first() -> None:
    shape = ExpertShape(3, 4, 12, 3)
    sound_row = [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    frail_row = [0, 0, 1, 1, 2, 2, 3, 3, 0, 1, 2, 3]
    single_rank_row = [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 1, 2]
    placement = np.array([sound_row, single_rank_row, frail_row], dtype=np.int32)
    installed = Layout(placement, even_shares(placement, 4))
    load = np.full((3, 4), 30, dtype=np.int64)
    aims = replace(limits(10, 9), planner=PlannerOptions(survive=1))
    proposal = propose(load, installed, shape, aims)
    assert proposal.plan.changed_layers == (1,)
    homes = [
        {slot // 4 for slot in np.flatnonzero(proposal.layout.placement[1] == e)} for e in range(4)
    ]
    assert min(map(len, homes)) > 1
    again = propose(load, proposal.layout, shape, aims)
    assert again.plan.changed_layers == ()


def test_proposal_skips_frail_layer_that_cannot_be_staged() -> None:
    shape = ExpertShape(2, 2, 4, 2)
    placement = np.array([[0, 0, 1, 1], [0, 1, 0, 1]], dtype=np.int32)
    installed = Layout(placement, even_shares(placement, 2))
    load = np.array([[5, 5], [90, 10]], dtype=np.int64)
    proposal = propose(
        load, installed, shape, replace(limits(0, 0), planner=PlannerOptions(survive=1))
    )
    assert proposal.plan.changed_layers == ()
    assert proposal.layout.placement.tolist() == placement.tolist()


def test_proposal_orders_layers_by_gain() -> None:
    shape = ExpertShape(2, 4, 4, 2)
    load = np.array([[12, 10, 8, 8], [30, 30, 1, 1]], dtype=np.int64)
    proposal = propose(load, start(shape), shape, limits(min_gain=0, staging=2))
    assert proposal.plan.changed_layers == (1, 0)


def test_proposal_keeps_layer_with_small_gain() -> None:
    shape = ExpertShape(1, 4, 4, 2)
    load = np.array([[11, 11, 10, 10]], dtype=np.int64)
    gain = imbalance(load, start(shape), shape)[0]
    assert propose(
        load, start(shape), shape, limits(min_gain=0, staging=9)
    ).plan.changed_layers == (0,)
    assert (
        propose(
            load, start(shape), shape, limits(min_gain=int(gain), staging=9)
        ).plan.changed_layers
        == ()
    )


def test_imbalance_is_max_over_mean_minus_one() -> None:
    shape = ExpertShape(1, 4, 4, 2)
    load = np.array([[30, 30, 20, 20]], dtype=np.int64)
    assert imbalance(load, start(shape), shape)[0] / SHARE_ONE == pytest.approx(0.2, abs=1e-4)


def test_imbalance_of_zero_load_is_zero() -> None:
    shape = ExpertShape(1, 4, 4, 2)
    assert imbalance(np.zeros((1, 4), dtype=np.int64), start(shape), shape).tolist() == [0]
