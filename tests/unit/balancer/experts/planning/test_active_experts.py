"""Active experts: every expert runs on one copy, and no rank runs more than it must."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from equipoise.balancer.experts import plan
from equipoise.balancer.experts.placement import SHARE_ONE
from equipoise.balancer.experts.planning.inputs import ActiveExperts, assign_single_replica

EQUAL_CAPACITIES = np.array([SHARE_ONE] * 3, dtype=np.int32)


def waits(active: ActiveExperts, placement: NDArray[np.int32], shares: NDArray[np.int32]) -> int:
    """What one layer's batches wait for: the most experts on a rank, summed over batches."""
    size = placement.size // EQUAL_CAPACITIES.size
    runs = [[int(shares[s] > 0 and row[placement[s]]) for s in range(placement.size)]
            for row in active]  # fmt: skip
    ranks = np.array(runs).reshape(len(active), -1, size).sum(axis=2)
    return int(ranks.max(axis=1).sum())


def least(active: ActiveExperts, placement: NDArray[np.int32]) -> int:
    """The lowest wait over all choices of one copy per expert."""
    slots = [np.flatnonzero(placement == e).tolist() for e in range(active.shape[1])]
    wait_sums = []
    for replica_choice in product(*slots):
        shares = np.zeros(placement.size, dtype=np.int32)
        shares[list(replica_choice)] = SHARE_ONE
        wait_sums.append(waits(active, placement, shares))
    return min(wait_sums)


@st.composite
def layers(draw: st.DrawFn) -> tuple[ActiveExperts, NDArray[np.int32]]:
    """Up to 8 experts in 9 slots of three ranks, no expert twice on one, and some batches."""
    experts = draw(st.integers(6, 8))
    spare = draw(st.lists(st.integers(0, experts - 1), min_size=9 - experts, max_size=9 - experts))
    places = draw(st.permutations([*range(experts), *spare]))
    batches = draw(st.integers(1, 6))
    row = st.lists(st.booleans(), min_size=experts, max_size=experts)
    active = draw(st.lists(row, min_size=batches, max_size=batches))
    return np.array(active, dtype=np.bool_), np.array(places, dtype=np.int32)


@settings(deadline=None)
@given(layers())
def test_active_expert_plan_uses_one_copy_per_expert_and_keeps_prediction(
    case: tuple[ActiveExperts, NDArray[np.int32]],
) -> None:
    active, placement = case
    assignment = assign_single_replica(active[:, None], placement[None], EQUAL_CAPACITIES)
    assert set(assignment.shares[0].tolist()) <= {0, SHARE_ONE}
    copies_in_use = np.bincount(placement[assignment.shares[0] > 0], minlength=active.shape[1])
    assert (copies_in_use == 1).all()
    wait, level = (
        waits(active, placement, assignment.shares[0]),
        active.sum() / EQUAL_CAPACITIES.size,
    )
    assert assignment.imbalance[0] == pytest.approx(wait / level - 1 if level else 0.0)


@settings(deadline=None)
@given(layers())
def test_active_expert_plan_cannot_be_improved_by_moving_one_expert(
    case: tuple[ActiveExperts, NDArray[np.int32]],
) -> None:
    active, placement = case
    shares = assign_single_replica(active[:, None], placement[None], EQUAL_CAPACITIES).shares[0]
    wait = waits(active, placement, shares)
    assert wait >= least(active, placement)
    for slot in np.flatnonzero(shares == 0):
        other = np.where(placement == placement[slot], 0, shares)
        other[slot] = SHARE_ONE
        assert waits(active, placement, other) >= wait


def test_active_expert_plan_separates_experts_of_same_batches() -> None:
    """0 and 1 share every batch, 2 and 3 the others; sums over batches do not tell."""
    active = np.array([[1, 1, 0, 0], [0, 0, 1, 1]] * 3, dtype=np.bool_)
    placement = np.array([0, 2, 1, 1, 3, 2], dtype=np.int32)
    rank_capacities = np.array([SHARE_ONE] * 2, dtype=np.int32)
    assignment = assign_single_replica(active[:, None], placement[None], rank_capacities)
    assert assignment.shares[0].tolist() in (
        [SHARE_ONE, SHARE_ONE, SHARE_ONE, 0, SHARE_ONE, 0],
        [SHARE_ONE, SHARE_ONE, 0, SHARE_ONE, SHARE_ONE, 0],
    )
    assert assignment.imbalance[0] == 0.0


def test_active_expert_plan_follows_rank_capacity() -> None:
    active = np.ones((4, 6), dtype=np.bool_)
    placement = np.array([0, 1, 2, 3, 4, 5] * 2, dtype=np.int32)
    capacity = np.array([4, 2], dtype=np.int32) * (SHARE_ONE // 3)
    shares = assign_single_replica(active[:, None], placement[None], capacity).shares[0]
    assert [int((half > 0).sum()) for half in np.split(shares, 2)] == [4, 2]


@pytest.mark.parametrize("policy", ["greedy", "connected", "incremental"])
def test_active_expert_plan_predicts_waits_of_recorded_batches(policy: str) -> None:
    rng = np.random.default_rng(0)
    odds = rng.uniform(0.1, 0.9, (2, 8))
    batches = (rng.uniform(size=(40, 2, 8)) < odds) * rng.integers(1, 50, (40, 2, 8))
    proposal = plan(batches, slots=12, ranks=3, policy=policy, objective="active_experts")
    for layer, predicted in enumerate(proposal.layer_imbalance):
        active = batches[:, layer] > 0
        wait = waits(active, proposal.placement[layer], proposal.shares[layer])
        assert predicted == pytest.approx(wait / (active.sum() / 3) - 1)
    assert proposal.predicted_imbalance == pytest.approx(proposal.layer_imbalance.mean())


def test_active_expert_plan_of_no_batches_is_level() -> None:
    no_batches = np.zeros((3, 2, 4), dtype=np.int64)
    proposal = plan(no_batches, slots=6, ranks=3, objective="active_experts")
    assert proposal.predicted_imbalance == 0.0
