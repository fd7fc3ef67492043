"""What every drop-in plans with: well formed, none twice on a rank, no worse than published."""

import numpy as np
import pytest
from helpers.references.published_placement_rule import is_double, published, rank_loads
from helpers.strategies.placement_problems import Problem, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balancer.compat.placement_policy import (
    PlacementRequest,
    compute_placement,
    has_duplicates,
    max_rank_rows,
)
from equipoise.balancer.experts import plan
from equipoise.hal.errors import PlacementError

UNHURRIED = settings(deadline=None)


def wish(problem: Problem, rule: str) -> PlacementRequest:
    return PlacementRequest(problem.slots, problem.ranks, policy=rule)


@UNHURRIED
@given(problems(), st.sampled_from(["best", "connected"]))
def test_place_gives_every_expert_a_slot_and_no_duplicate_on_a_rank(
    problem: Problem, rule: str
) -> None:
    placement = compute_placement(problem.load, wish(problem, rule))
    for row in placement.tolist():
        assert set(row) == set(range(problem.experts))
        assert not is_double(row, problem.ranks)
    assert not has_duplicates(placement, problem.ranks).any()


@UNHURRIED
@given(problems())
def test_best_rule_is_no_worse_than_published_rule_without_duplicates(problem: Problem) -> None:
    best = compute_placement(problem.load, wish(problem, "best"))
    reference = published(problem.load, problem.slots, problem.ranks)
    layers = zip(problem.load.tolist(), best.tolist(), reference.tolist(), strict=True)
    for load, best_row, reference_row in layers:
        if not is_double(reference_row, problem.ranks):
            rounding = problem.slots / 65536
            highest = max(rank_loads(reference_row, load, problem.ranks))
            assert max(rank_loads(best_row, load, problem.ranks)) <= highest + rounding


@UNHURRIED
@given(problems())
def test_greedy_rule_equals_published_rule_slot_by_slot(problem: Problem) -> None:
    placement = compute_placement(problem.load, wish(problem, "greedy"))
    assert (placement == published(problem.load, problem.slots, problem.ranks)).all()


def test_connected_rule_plans_for_solved_shares() -> None:
    """Not that for an even split, which minds no joints."""
    load = np.random.default_rng(3).poisson(900, (4, 64)).astype(np.int64)
    placement = compute_placement(load, PlacementRequest(80, 16, policy="connected"))
    assert (placement == plan(load, slots=80, ranks=16, policy="connected").placement).all()
    assert (placement != plan(load, slots=80, ranks=16, target=0.0, split="even").placement).any()


@UNHURRIED
@given(problems(), st.data())
def test_place_from_installed_never_raises_peak_load(problem: Problem, data: st.DataObject) -> None:
    installed_placement = compute_placement(problem.load, wish(problem, "best"))
    later_load = problem.load[:, data.draw(st.permutations(range(problem.experts)))]
    replanned = compute_placement(later_load, wish(problem, "best"), installed_placement)
    assert not has_duplicates(replanned, problem.ranks).any()
    for row in replanned.tolist():
        assert set(row) == set(range(problem.experts))
    before, after = (
        max_rank_rows(later_load, placement, problem.ranks)
        for placement in (installed_placement, replanned)
    )
    assert (after <= before * 1.00001 + problem.slots).all()


@UNHURRIED
@given(problems(), st.data())
def test_place_separates_duplicates_on_a_rank(problem: Problem, data: st.DataObject) -> None:
    spare = problem.slots - problem.experts
    ids = st.integers(0, problem.experts - 1)
    extra = data.draw(st.lists(ids, min_size=spare, max_size=spare))
    row = data.draw(st.permutations([*range(problem.experts), *extra]))
    installed_placement = np.tile(np.array(row, dtype=np.int32), (len(problem.load), 1))
    replanned = compute_placement(problem.load, wish(problem, "best"), installed_placement)
    assert not has_duplicates(replanned, problem.ranks).any()
    for layer_row in replanned.tolist():
        assert set(layer_row) == set(range(problem.experts))


@UNHURRIED
@given(problems())
def test_place_moves_nothing_when_target_is_met(problem: Problem) -> None:
    installed_placement = compute_placement(problem.load, wish(problem, "best"))
    means = problem.load.sum(axis=1) * 65536 / problem.ranks
    level = max_rank_rows(problem.load, installed_placement, problem.ranks) <= means * 1.0199
    replanned = compute_placement(problem.load, wish(problem, "best"), installed_placement)
    assert (replanned[level] == installed_placement[level]).all()


def test_place_with_excess_slots_equals_published_rule() -> None:
    load = np.array([[3, 5]])
    for rule in ("best", "connected", "greedy"):
        assert (
            compute_placement(load, PlacementRequest(8, 2, policy=rule)) == published(load, 8, 2)
        ).all()


def test_place_lowers_peak_on_130_ranks_from_installed() -> None:
    rng = np.random.default_rng(3)
    load = rng.poisson(1000 * np.exp(0.3 * rng.standard_normal((2, 260))))
    request = PlacementRequest(390, 130)
    installed_placement = compute_placement(load, request)
    later_load = rng.poisson(load * np.exp(0.2 * rng.standard_normal((2, 260))))
    replanned = compute_placement(later_load, request, installed_placement)
    assert not has_duplicates(replanned, 130).any()
    assert (
        max_rank_rows(later_load, replanned, 130)
        < max_rank_rows(later_load, installed_placement, 130)
    ).all()


@pytest.mark.parametrize(
    ("placement_request", "message"),
    [
        (PlacementRequest(9, 2), "9 slots do not divide among 2 ranks"),
        (PlacementRequest(2, 2), "2 slots cannot hold 4 experts"),
        (PlacementRequest(8, 4, 3), "4 ranks do not divide among 3 nodes"),
        (
            PlacementRequest(8, 4, policy="fair"),
            "policy must be one of best, connected, greedy, got 'fair'",
        ),
    ],
)
def test_place_refuses_impossible_numbers_in_one_line(
    placement_request: PlacementRequest, message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        compute_placement(np.array([[1, 2, 3, 4]]), placement_request)
